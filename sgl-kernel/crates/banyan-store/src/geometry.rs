// SPDX-License-Identifier: Apache-2.0
//! Where the layers of a page lie: packed in a frame of memory, each on a block boundary in a record of a segment.

use std::ops::Range;

use crate::error::{Result, invalid};

/// Unit of alignment on disk and of frames in memory. A multiple of what any drive wants for O_DIRECT.
pub const BLOCK_BYTES: usize = 4096;

/// One header block holds the checksums of so many layers.
pub const MAX_LAYERS: usize = 480;

/// No page is larger: lengths of one transfer stay within what the kernel takes at once.
const MAX_RECORD_BYTES: u64 = 1 << 30;

/// Reads are cut to requests of no more than this, where that does not cut a layer: larger ones got 0.8 to 0.95 of a drive's bandwidth.
pub const REQUEST_BYTES: u64 = 512 << 10;

/// Index of a record within its shelf.
pub type Place = u32;

pub fn round_up(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES as u64)
}

/// The shape of every record of a shelf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    layer_bytes: Vec<u32>,
    /// Prefix sums; one more than there are layers.
    in_frame: Vec<u64>,
    in_record: Vec<u64>,
}

impl Geometry {
    pub fn new(layer_bytes: &[u64]) -> Result<Self> {
        if layer_bytes.is_empty() || layer_bytes.len() > MAX_LAYERS {
            let given = layer_bytes.len();
            return invalid!("a page has 1 to {MAX_LAYERS} layers, not {given}");
        }
        let mut geometry = Self {
            layer_bytes: Vec::with_capacity(layer_bytes.len()),
            in_frame: vec![0],
            in_record: vec![BLOCK_BYTES as u64],
        };
        let (mut frame, mut record) = (0, BLOCK_BYTES as u64);
        for (layer, &bytes) in layer_bytes.iter().enumerate() {
            if bytes == 0 || bytes > MAX_RECORD_BYTES {
                return invalid!("layer {layer} of a page has {bytes} bytes");
            }
            frame += bytes;
            record += round_up(bytes);
            geometry.layer_bytes.push(bytes as u32);
            geometry.in_frame.push(frame);
            geometry.in_record.push(record);
        }
        if record > MAX_RECORD_BYTES {
            return invalid!("a page of {frame} bytes is more than {MAX_RECORD_BYTES} allow");
        }
        Ok(geometry)
    }

    pub fn num_layers(&self) -> usize {
        self.layer_bytes.len()
    }

    pub fn layer_bytes(&self) -> &[u32] {
        &self.layer_bytes
    }

    /// Bytes of a page in memory, without padding.
    pub fn frame_bytes(&self) -> u64 {
        self.in_frame[self.num_layers()]
    }

    /// Bytes of a record on disk: header block and padded layers.
    pub fn record_bytes(&self) -> u64 {
        self.in_record[self.num_layers()]
    }

    /// Where these layers lie in a frame.
    pub fn in_frame(&self, layers: &Range<usize>) -> Range<u64> {
        self.in_frame[layers.start]..self.in_frame[layers.end]
    }

    /// Where these layers lie in a record, padding included.
    pub fn in_record(&self, layers: &Range<usize>) -> Range<u64> {
        self.in_record[layers.start]..self.in_record[layers.end]
    }

    /// All layers, in order and cut: each piece is one layer, or at most `max_layers` and REQUEST_BYTES on disk.
    pub fn cut(&self, max_layers: usize) -> Vec<Range<usize>> {
        let mut pieces: Vec<Range<usize>> = Vec::new();
        for layer in 0..self.num_layers() {
            match pieces.last_mut() {
                Some(piece)
                    if piece.len() < max_layers
                        && self.bytes_on_disk(piece.start..layer + 1) <= REQUEST_BYTES =>
                {
                    piece.end = layer + 1;
                }
                _ => pieces.push(layer..layer + 1),
            }
        }
        pieces
    }

    fn bytes_on_disk(&self, layers: Range<usize>) -> u64 {
        self.in_record[layers.end] - self.in_record[layers.start]
    }

    /// Bytes on disk of the largest piece that `cut` may make.
    pub fn max_piece_bytes(&self) -> u64 {
        let num_layers = self.num_layers();
        let layers = (0..num_layers).map(|layer| self.bytes_on_disk(layer..layer + 1));
        let largest_layer_bytes = layers.max().unwrap_or(0);
        self.bytes_on_disk(0..num_layers)
            .min(REQUEST_BYTES.max(largest_layer_bytes))
    }

    /// Whether memory and disk agree byte for byte: then nothing has to be copied on the way.
    pub fn is_dense(&self) -> bool {
        let block = BLOCK_BYTES as u32;
        self.layer_bytes
            .iter()
            .all(|bytes| bytes.is_multiple_of(block))
    }
}

/// How a shelf's records are spread over its segment files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segmenting {
    pub places_per_segment: u32,
    pub record_bytes: u64,
}

impl Segmenting {
    /// One header block, then records.
    pub fn file_bytes(&self) -> u64 {
        BLOCK_BYTES as u64 + u64::from(self.places_per_segment) * self.record_bytes
    }

    /// Segment number and byte offset of a place's record.
    pub fn locate(&self, place: Place) -> (u32, u64) {
        let index = u64::from(place % self.places_per_segment);
        let offset = BLOCK_BYTES as u64 + index * self.record_bytes;
        (place / self.places_per_segment, offset)
    }

    /// Whether the places of a segment have numbers.
    pub fn has(&self, segment: u32) -> bool {
        let end = (u64::from(segment) + 1) * u64::from(self.places_per_segment);
        end < u64::from(Place::MAX / 2)
    }

    pub fn places_of(&self, segment: u32) -> Range<Place> {
        segment * self.places_per_segment..(segment + 1) * self.places_per_segment
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_when_whole_blocks_then_memory_and_disk_agree() {
        let geometry = Geometry::new(&[12288; 30]).unwrap();
        assert!(geometry.is_dense());
        assert_eq!(geometry.frame_bytes(), 30 * 12288);
        assert_eq!(geometry.record_bytes(), 4096 + 30 * 12288);
        assert_eq!(geometry.in_record(&(1..2)), 4096 + 12288..4096 + 24576);
        assert_eq!(geometry.in_frame(&(1..2)), 12288..24576);
    }

    #[test]
    fn layers_when_odd_then_each_starts_on_a_block() {
        let geometry = Geometry::new(&[100, 5000, 1]).unwrap();
        assert!(!geometry.is_dense());
        assert_eq!(geometry.in_frame(&(0..3)), 0..5101);
        assert_eq!(geometry.in_record(&(1..3)), 8192..8192 + 8192 + 4096);
    }

    #[test]
    fn layers_when_cut_then_pieces_stay_within_a_request_or_are_one_layer() {
        let small = Geometry::new(&[12288; 30]).unwrap();
        assert_eq!((small.cut(30).len(), &small.cut(30)[0]), (1, &(0..30)));
        assert_eq!(small.cut(20), [0..20, 20..30]);
        assert_eq!(small.max_piece_bytes(), 30 * 12288);
        let large = Geometry::new(&[200 << 10; 5]).unwrap();
        assert_eq!(large.cut(5), [0..2, 2..4, 4..5]);
        assert_eq!(large.max_piece_bytes(), REQUEST_BYTES);
        let mixed = Geometry::new(&[1, 700 << 10, 4096, 4096]).unwrap();
        assert_eq!(mixed.cut(9), [0..1, 1..2, 2..4]);
        assert_eq!(mixed.cut(1), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(mixed.max_piece_bytes(), 700 << 10);
    }

    #[test]
    fn shapes_when_impossible_then_refused() {
        for layers in [
            vec![],
            vec![0],
            vec![1; MAX_LAYERS + 1],
            vec![MAX_RECORD_BYTES; 2],
        ] {
            assert!(Geometry::new(&layers).is_err(), "{layers:?}");
        }
    }

    #[test]
    fn places_when_located_then_behind_the_segment_header_without_overlap() {
        let segmenting = Segmenting {
            places_per_segment: 3,
            record_bytes: 8192,
        };
        assert_eq!(segmenting.locate(0), (0, 4096));
        assert_eq!(segmenting.locate(5), (1, 4096 + 2 * 8192));
        assert_eq!(segmenting.places_of(1), 3..6);
        assert_eq!(segmenting.file_bytes(), 4096 + 3 * 8192);
    }
}
