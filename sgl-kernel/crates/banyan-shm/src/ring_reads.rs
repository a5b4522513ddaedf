// SPDX-License-Identifier: Apache-2.0
//! Reads prepared layer by layer, for the ring: each is submitted when the GPU asks for its layer.
//!
//! Invariant: every piece lies inside the target memory (checked when it is prepared); the frames behind it belong to the batch until it
//! has ended.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::error::{Result, invalid};
use crate::flag_ring::LayerWork;
use crate::memory::SharedMemory;

/// `num_bytes` at `file_offset` of a file, to `target_offset` of the memory.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub file: usize,
    pub file_offset: u64,
    pub num_bytes: usize,
    pub target_offset: usize,
}

/// One batch: for each layer the pieces that make it.
pub struct LayerReads {
    files: Vec<fs::File>,
    layers: Vec<Vec<Piece>>,
    target: Arc<SharedMemory>,
}

impl LayerReads {
    pub fn prepare(
        files: Vec<fs::File>,
        layers: Vec<Vec<Piece>>,
        target: Arc<SharedMemory>,
    ) -> Result<Self> {
        for piece in layers.iter().flatten() {
            let end = piece.target_offset.checked_add(piece.num_bytes);
            if piece.file >= files.len() || end.is_none_or(|end| end > target.len()) {
                return invalid!(
                    "{piece:?} with {} files and {} bytes of target",
                    files.len(),
                    target.len()
                );
            }
        }
        Ok(Self {
            files,
            layers,
            target,
        })
    }
}

impl LayerWork for LayerReads {
    fn num_layers(&self) -> usize {
        self.layers.len()
    }

    fn run_layer(&mut self, layer: usize) -> std::result::Result<(), String> {
        for piece in &self.layers[layer] {
            let start = self.target.mapping().start();
            // SAFETY: inside the mapping (checked in `prepare`), which `target` keeps; the frames are this batch's, nobody else touches them.
            let bytes = unsafe {
                std::slice::from_raw_parts_mut(start.add(piece.target_offset), piece.num_bytes)
            };
            self.files[piece.file]
                .read_exact_at(bytes, piece.file_offset)
                .map_err(|cause| format!("{piece:?} of layer {layer}: {cause}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(bytes: &[u8]) -> fs::File {
        let memory = SharedMemory::create(bytes.len(), "file").unwrap();
        let path = format!("/proc/self/fd/{}", memory.fd());
        let mut options = fs::OpenOptions::new();
        let mut file = options.read(true).write(true).open(path).unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn piece(file_offset: u64, num_bytes: usize, target_offset: usize) -> Piece {
        Piece {
            file: 0,
            file_offset,
            num_bytes,
            target_offset,
        }
    }

    #[test]
    fn layer_when_run_then_only_its_pieces_are_in_place() {
        let target = Arc::new(SharedMemory::create(16, "target").unwrap());
        let layers = vec![vec![piece(0, 4, 8), piece(4, 2, 0)], vec![piece(2, 4, 12)]];
        let mut reads =
            LayerReads::prepare(vec![file(b"abcdefgh")], layers, target.clone()).unwrap();
        reads.run_layer(0).unwrap();
        // SAFETY: our own memory, nobody writes it now.
        let bytes = unsafe { std::slice::from_raw_parts(target.mapping().start(), 16) };
        assert_eq!(bytes, b"ef\0\0\0\0\0\0abcd\0\0\0\0");
    }

    #[test]
    fn piece_when_the_file_is_too_short_then_an_error_names_it() {
        let target = Arc::new(SharedMemory::create(16, "target").unwrap());
        let layers = vec![vec![piece(6, 4, 0)]];
        let mut reads = LayerReads::prepare(vec![file(b"abcdefgh")], layers, target).unwrap();
        assert!(reads.run_layer(0).unwrap_err().contains("layer 0"));
    }

    #[test]
    fn piece_when_outside_the_target_then_refused() {
        let target = Arc::new(SharedMemory::create(16, "target").unwrap());
        for bad in [
            piece(0, 4, 13),
            piece(0, usize::MAX, 1),
            Piece {
                file: 1,
                ..piece(0, 1, 0)
            },
        ] {
            let layers = vec![vec![bad]];
            assert!(LayerReads::prepare(vec![file(b"abcd")], layers, target.clone()).is_err());
        }
    }
}
