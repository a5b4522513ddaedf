// SPDX-License-Identifier: Apache-2.0
//! Memory that O_DIRECT accepts.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use crate::device::Span;
use crate::geometry::BLOCK_BYTES;

/// Zeroed bytes that start on a block boundary. Devices write into it behind the compiler's back, hence no `Vec`.
pub struct AlignedBytes {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: owned memory; who touches it while an operation is in flight is the contract of `device::Op`.
unsafe impl Send for AlignedBytes {}

impl AlignedBytes {
    pub fn new(len: usize) -> Self {
        let len = len.max(1).next_multiple_of(BLOCK_BYTES);
        let Ok(layout) = Layout::from_size_align(len, BLOCK_BYTES) else {
            panic!("a buffer of {len} bytes cannot be laid out")
        };
        // SAFETY: the layout has a size.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Self { start, layout }
    }

    /// `len` bytes from `at` on, for an operation.
    pub fn span(&self, at: usize, len: usize) -> Span {
        assert!(at + len <= self.layout.size());
        Span {
            start: self.start.wrapping_add(at),
            len,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: our allocation, initialised; no operation is in flight (the caller holds the buffer, not the device).
        unsafe { std::slice::from_raw_parts(self.start, self.layout.size()) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}

/// Buffers of one size, kept for the next operation.
pub struct BufferPool {
    len: usize,
    idle: Vec<AlignedBytes>,
}

impl BufferPool {
    pub fn new(len: usize) -> Self {
        Self {
            len,
            idle: Vec::new(),
        }
    }

    pub fn take(&mut self) -> AlignedBytes {
        let idle = self.idle.pop();
        idle.unwrap_or_else(|| AlignedBytes::new(self.len))
    }

    pub fn give_back(&mut self, buffer: AlignedBytes) {
        self.idle.push(buffer);
    }
}
