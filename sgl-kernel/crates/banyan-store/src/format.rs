// SPDX-License-Identifier: Apache-2.0
//! The bytes on disk; docs/format.md is the same in pictures. Whatever does not verify decodes to `None`.

use banyan_shm::frame::Key;
use twox_hash::XxHash3_64;

use crate::geometry::{BLOCK_BYTES, Geometry, MAX_LAYERS, Place, Segmenting};

pub const FORMAT: u32 = 2;

/// No epoch, generation or sequence number is greater: what comes after it still has one.
pub const MOST_NUMBER: u64 = u64::MAX >> 8;

/// Whether a writer that goes on from this number will not come to the last one.
pub fn leaves_room(number: u64) -> bool {
    number <= MOST_NUMBER / 2
}

/// Digest of everything that must agree before two pages may be exchanged.
pub type Namespace = [u64; 4];

/// The parent of a first page.
pub const NO_PARENT: Key = [0; 4];

pub const ENTRY_BYTES: usize = 136;
const RECORD_MAGIC: u64 = u64::from_le_bytes(*b"BNYNREC1");
const MANIFEST_MAGIC: u64 = u64::from_le_bytes(*b"BNYNMAN2");
const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"BNYNSEG1");
const LAYERS_AT: usize = 128;
const _: () = assert!(LAYERS_AT + MAX_LAYERS * 8 <= BLOCK_BYTES);

/// Who a record is: what its checksums are bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub key: Key,
    pub namespace: Namespace,
    pub generation: u64,
}

impl Identity {
    /// Checksum of one layer of exactly this record.
    pub fn checksum(&self, layer: usize, bytes: &[u8]) -> u64 {
        XxHash3_64::oneshot_with_seed(self.seed(layer), bytes)
    }

    fn seed(&self, layer: usize) -> u64 {
        let mut name = [0; 80];
        put_words(&mut name, 0, &self.key);
        put_words(&mut name, 32, &self.namespace);
        put_words(&mut name, 64, &[self.generation, layer as u64]);
        XxHash3_64::oneshot(&name)
    }
}

/// What stands for a whole record: its layers' checksums, which are bound to its identity, in one.
pub fn record_checksum(layers: &[u64]) -> u64 {
    let mut bytes = vec![0; layers.len() * 8];
    put_words(&mut bytes, 0, layers);
    XxHash3_64::oneshot(&bytes)
}

/// What a manifest says of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub identity: Identity,
    pub parent: Key,
    /// `record_checksum` of its layers: a reader of the whole record needs no header.
    pub checksum: u64,
}

/// The first block of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    pub identity: Identity,
    pub parent: Key,
    pub checksums: Vec<u64>,
}

impl RecordHeader {
    pub fn encode(&self, block: &mut [u8]) {
        block.fill(0);
        put_words(block, 16, &[self.identity.generation]);
        put_halves(block, 24, &[self.checksums.len() as u32, 0]);
        put_words(block, 32, &self.identity.key);
        put_words(block, 64, &self.parent);
        put_words(block, 96, &self.identity.namespace);
        put_words(block, LAYERS_AT, &self.checksums);
        seal(block, RECORD_MAGIC);
    }

    pub fn decode(block: &[u8]) -> Option<Self> {
        unseal(block, RECORD_MAGIC)?;
        let num_layers = half(block, 24) as usize;
        let layers = block.get(LAYERS_AT..LAYERS_AT + num_layers.checked_mul(8)?)?;
        Some(Self {
            identity: Identity {
                generation: word(block, 16),
                key: words(block, 32),
                namespace: words(block, 96),
            },
            parent: words(block, 64),
            checksums: layers.chunks_exact(8).map(|bytes| word(bytes, 0)).collect(),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Publish,
    Retire,
}

/// One line of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub sequence: u64,
    pub kind: Kind,
    pub place: Place,
    pub record: Record,
}

impl Entry {
    pub fn encode(&self, epoch: u64, bytes: &mut [u8]) {
        let kind = match self.kind {
            Kind::Publish => 1,
            Kind::Retire => 2,
        };
        put_words(bytes, 8, &[self.sequence]);
        put_halves(bytes, 16, &[kind, self.place]);
        let Record {
            identity,
            parent,
            checksum,
        } = &self.record;
        put_words(bytes, 24, &[identity.generation]);
        put_words(bytes, 32, &identity.key);
        put_words(bytes, 64, parent);
        put_words(bytes, 96, &identity.namespace);
        put_words(bytes, 128, &[*checksum]);
        let checksum = XxHash3_64::oneshot_with_seed(epoch, &bytes[8..ENTRY_BYTES]);
        put_words(bytes, 0, &[checksum]);
    }

    pub fn decode(epoch: u64, bytes: &[u8]) -> Option<Self> {
        let checksum = XxHash3_64::oneshot_with_seed(epoch, &bytes[8..ENTRY_BYTES]);
        let kind = match half(bytes, 16) {
            1 => Kind::Publish,
            2 => Kind::Retire,
            _ => return None,
        };
        let is_right = checksum == word(bytes, 0);
        (is_right && word(bytes, 8).max(word(bytes, 24)) <= MOST_NUMBER).then(|| Self {
            sequence: word(bytes, 8),
            kind,
            place: half(bytes, 20),
            record: Record {
                identity: Identity {
                    generation: word(bytes, 24),
                    key: words(bytes, 32),
                    namespace: words(bytes, 96),
                },
                parent: words(bytes, 64),
                checksum: word(bytes, 128),
            },
        })
    }
}

/// The first block of a manifest and, with the segment's number in place of the epoch, of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileHeader {
    pub shelf: u64,
    /// Manifest: its epoch. Segment: its number.
    pub number: u64,
    /// Manifest: every later sequence number is greater. Segment: zero.
    pub sequence: u64,
    pub namespace: Namespace,
    pub places_per_segment: u32,
    pub geometry: Geometry,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    Manifest,
    Segment,
}

impl FileKind {
    fn magic(self) -> u64 {
        match self {
            Self::Manifest => MANIFEST_MAGIC,
            Self::Segment => SEGMENT_MAGIC,
        }
    }
}

impl FileHeader {
    pub fn segmenting(&self) -> Segmenting {
        Segmenting {
            places_per_segment: self.places_per_segment,
            record_bytes: self.geometry.record_bytes(),
        }
    }

    pub fn encode(&self, kind: FileKind) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES];
        let layers = self.geometry.layer_bytes();
        put_halves(&mut block, 16, &[FORMAT, self.places_per_segment]);
        put_words(
            &mut block,
            24,
            &[self.shelf, self.number, self.sequence, layers.len() as u64],
        );
        put_words(&mut block, 56, &self.namespace);
        put_halves(&mut block, LAYERS_AT, layers);
        seal(&mut block, kind.magic());
        block
    }

    pub fn decode(kind: FileKind, block: &[u8]) -> Option<Self> {
        unseal(block, kind.magic())?;
        let num_layers = usize::try_from(word(block, 48)).ok()?;
        let layers = block.get(LAYERS_AT..LAYERS_AT + num_layers.checked_mul(4)?)?;
        let layers: Vec<u64> = layers
            .chunks_exact(4)
            .map(|bytes| half(bytes, 0).into())
            .collect();
        let places_per_segment = half(block, 20);
        let has_numbers = word(block, 32).max(word(block, 40)) <= MOST_NUMBER;
        if half(block, 16) != FORMAT || places_per_segment == 0 || !has_numbers {
            return None;
        }
        Some(Self {
            shelf: word(block, 24),
            number: word(block, 32),
            sequence: word(block, 40),
            namespace: words(block, 56),
            places_per_segment,
            geometry: Geometry::new(&layers).ok()?,
        })
    }
}

fn seal(block: &mut [u8], magic: u64) {
    let checksum = XxHash3_64::oneshot(&block[16..BLOCK_BYTES]);
    put_words(block, 0, &[magic, checksum]);
}

fn unseal(block: &[u8], magic: u64) -> Option<()> {
    let block = block.get(..BLOCK_BYTES)?;
    (word(block, 0) == magic && word(block, 8) == XxHash3_64::oneshot(&block[16..])).then_some(())
}

fn put_words(bytes: &mut [u8], at: usize, values: &[u64]) {
    for (place, value) in bytes[at..].chunks_exact_mut(8).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

fn put_halves(bytes: &mut [u8], at: usize, values: &[u32]) {
    for (place, value) in bytes[at..].chunks_exact_mut(4).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}

fn words(bytes: &[u8], at: usize) -> [u64; 4] {
    [0, 8, 16, 24].map(|step| word(bytes, at + step))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            key: [1, 2, 3, 4],
            namespace: [5, 6, 7, 8],
            generation: 9,
        }
    }

    fn header() -> RecordHeader {
        RecordHeader {
            identity: identity(),
            parent: NO_PARENT,
            checksums: (0..MAX_LAYERS as u64).collect(),
        }
    }

    #[test]
    fn record_header_when_any_bit_flips_then_none() {
        let mut block = vec![0; BLOCK_BYTES];
        header().encode(&mut block);
        assert_eq!(RecordHeader::decode(&block), Some(header()));
        for at in [0, 8, 16, 24, 40, 127, 128, 4000, BLOCK_BYTES - 1] {
            block[at] ^= 4;
            assert_eq!(RecordHeader::decode(&block), None, "byte {at}");
            block[at] ^= 4;
        }
        assert_eq!(RecordHeader::decode(&block[..100]), None);
    }

    #[test]
    fn checksum_when_another_page_layer_or_generation_then_differs() {
        let bytes = [7; 4096];
        let right = identity().checksum(0, &bytes);
        assert_ne!(right, identity().checksum(1, &bytes));
        let others = [
            Identity {
                key: [1, 2, 3, 5],
                ..identity()
            },
            Identity {
                namespace: [0; 4],
                ..identity()
            },
            Identity {
                generation: 10,
                ..identity()
            },
        ];
        for other in others {
            assert_ne!(right, other.checksum(0, &bytes));
        }
    }

    #[test]
    fn entry_when_torn_or_of_another_epoch_then_none() {
        let entry = Entry {
            sequence: 3,
            kind: Kind::Retire,
            place: 4,
            record: Record {
                identity: identity(),
                parent: [9; 4],
                checksum: 10,
            },
        };
        let mut bytes = [0; ENTRY_BYTES];
        entry.encode(1, &mut bytes);
        assert_eq!(Entry::decode(1, &bytes), Some(entry));
        assert_eq!(Entry::decode(2, &bytes), None);
        bytes[64..].fill(0);
        assert_eq!(Entry::decode(1, &bytes), None);
        assert_eq!(Entry::decode(1, &[0; ENTRY_BYTES]), None);
    }

    #[test]
    fn numbers_when_none_could_follow_them_then_none() {
        let entry = Entry {
            sequence: MOST_NUMBER,
            kind: Kind::Publish,
            place: 4,
            record: Record {
                identity: identity(),
                parent: NO_PARENT,
                checksum: 10,
            },
        };
        let mut bytes = [0; ENTRY_BYTES];
        entry.encode(1, &mut bytes);
        assert_eq!(Entry::decode(1, &bytes), Some(entry));
        let later = Entry {
            sequence: MOST_NUMBER + 1,
            ..entry
        };
        later.encode(1, &mut bytes);
        assert_eq!(Entry::decode(1, &bytes), None);
        let mut header = FileHeader {
            shelf: 1,
            number: MOST_NUMBER,
            sequence: 3,
            namespace: [4; 4],
            places_per_segment: 5,
            geometry: Geometry::new(&[100]).unwrap(),
        };
        let decoded = |header: &FileHeader| {
            FileHeader::decode(FileKind::Manifest, &header.encode(FileKind::Manifest))
        };
        assert!(decoded(&header).is_some());
        header.number += 1;
        assert_eq!(decoded(&header), None);
    }

    #[test]
    fn file_header_when_of_the_other_kind_then_none() {
        let header = FileHeader {
            shelf: 1,
            number: 2,
            sequence: 3,
            namespace: [4; 4],
            places_per_segment: 5,
            geometry: Geometry::new(&[100; 80]).unwrap(),
        };
        let block = header.encode(FileKind::Manifest);
        assert_eq!(FileHeader::decode(FileKind::Manifest, &block), Some(header));
        assert_eq!(FileHeader::decode(FileKind::Segment, &block), None);
    }
}
