// SPDX-License-Identifier: Apache-2.0
//! A transfer that goes on where a short one stopped.

use std::io;

use banyan_shm::memory::SharedMemory;

use super::{Action, Op};

/// Memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub start: *mut u8,
    pub len: usize,
}

// SAFETY: an address and a length; who may touch the bytes is the contract of `Op`.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    pub const EMPTY: Span = Span {
        start: std::ptr::null_mut(),
        len: 0,
    };

    pub fn of(bytes: &mut [u8]) -> Self {
        Self {
            start: bytes.as_mut_ptr(),
            len: bytes.len(),
        }
    }

    /// `len` bytes of shared memory from `at` on.
    pub fn within(memory: &SharedMemory, at: usize, len: usize) -> Self {
        assert!(at + len <= memory.len());
        Self {
            start: memory.mapping().start().wrapping_add(at),
            len,
        }
    }

    /// # Safety
    /// The bytes are valid and nobody writes them while the slice lives.
    pub unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// # Safety
    /// The bytes are valid and nobody else touches them while the slice lives.
    pub unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    fn skip(self, bytes: usize) -> Self {
        Self {
            start: self.start.wrapping_add(bytes),
            len: self.len - bytes,
        }
    }
}

/// Runs of memory of one operation.
pub const MAX_SPANS: usize = 16;

/// Up to `MAX_SPANS` runs of memory for one run of a file: headers and what follows them. Empty ones come last.
#[derive(Clone, Copy, Debug)]
pub struct Spans([Span; MAX_SPANS]);

impl Spans {
    pub fn one(span: Span) -> Self {
        Self::of([span])
    }

    /// Leaves out what is empty. There are at most `MAX_SPANS`.
    pub fn of(spans: impl IntoIterator<Item = Span>) -> Self {
        let mut all = [Span::EMPTY; MAX_SPANS];
        let filled = spans.into_iter().filter(|span| span.len > 0);
        for (index, span) in filled.enumerate() {
            all[index] = span;
        }
        Self(all)
    }

    pub fn iter(&self) -> impl Iterator<Item = Span> {
        self.0.into_iter().take_while(|span| span.len > 0)
    }

    pub fn len(&self) -> usize {
        self.iter().map(|span| span.len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Vectors for the kernel, and how many of them count.
    pub(super) fn vectors(&self) -> ([libc::iovec; MAX_SPANS], u32) {
        let vectors = self.0.map(|span| libc::iovec {
            iov_base: span.start.cast(),
            iov_len: span.len,
        });
        (vectors, self.iter().count() as u32)
    }

    fn skip(self, mut bytes: usize) -> Self {
        Self::of(self.iter().map(|span| {
            let skipped = bytes.min(span.len);
            bytes -= skipped;
            span.skip(skipped)
        }))
    }
}

/// What became of one attempt.
pub enum Progress {
    /// Ask again with the operation as it is now.
    Again,
    Ended(io::Result<()>),
}

/// Takes the kernel's answer (bytes or negative errno) to one attempt of `op`, and moves `op` behind what was transferred.
pub fn advance(op: &mut Op, answer: i32) -> Progress {
    if answer < 0 {
        return match -answer {
            libc::EINTR | libc::EAGAIN => Progress::Again,
            errno => Progress::Ended(Err(io::Error::from_raw_os_error(errno))),
        };
    }
    let spans = match &mut op.action {
        Action::Sync => return Progress::Ended(Ok(())),
        Action::Read(spans) | Action::Write(spans) => spans,
    };
    let moved = answer as usize;
    if moved == spans.len() {
        return Progress::Ended(Ok(()));
    }
    if moved == 0 {
        return Progress::Ended(Err(io::ErrorKind::UnexpectedEof.into()));
    }
    *spans = spans.skip(moved);
    op.offset += moved as u64;
    Progress::Again
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::FileId;

    #[test]
    fn transfer_when_short_then_goes_on_in_the_right_span() {
        let (mut first, mut second, mut third) = ([0; 8], [0; 8], [0; 8]);
        let spans = Spans::of([&mut first, &mut second, &mut third].map(|part| Span::of(part)));
        let mut op = Op {
            token: 0,
            file: FileId(0),
            offset: 100,
            action: Action::Read(spans),
        };
        assert!(matches!(advance(&mut op, 5), Progress::Again));
        assert!(matches!(advance(&mut op, 7), Progress::Again));
        let Action::Read(rest) = op.action else {
            panic!("still a read")
        };
        assert_eq!((op.offset, rest.len()), (112, 12));
        let starts: Vec<*mut u8> = rest.iter().map(|span| span.start).collect();
        assert_eq!(
            starts,
            [second.as_mut_ptr().wrapping_add(4), third.as_mut_ptr()]
        );
        assert!(matches!(advance(&mut op, 12), Progress::Ended(Ok(()))));
    }

    #[test]
    fn transfer_when_the_file_ends_then_an_error() {
        let mut bytes = [0; 8];
        let mut op = Op {
            token: 0,
            file: FileId(0),
            offset: 0,
            action: Action::Read(Spans::one(Span::of(&mut bytes))),
        };
        assert!(matches!(advance(&mut op, 0), Progress::Ended(Err(_))));
        assert!(matches!(
            advance(&mut op, -libc::EIO),
            Progress::Ended(Err(_))
        ));
        assert!(matches!(advance(&mut op, -libc::EINTR), Progress::Again));
    }
}
