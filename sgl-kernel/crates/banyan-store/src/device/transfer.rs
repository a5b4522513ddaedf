// SPDX-License-Identifier: Apache-2.0
//! A transfer that goes on where a short one stopped.

use std::io;

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

/// One or two runs of memory for one run of a file: a header and what follows it.
#[derive(Clone, Copy, Debug)]
pub struct Spans(pub [Span; 2]);

impl Spans {
    pub fn one(span: Span) -> Self {
        Self([span, Span::EMPTY])
    }

    pub fn len(&self) -> usize {
        self.0[0].len + self.0[1].len
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Vectors for the kernel, without empty ones at the end.
    pub(super) fn vectors(&self) -> ([libc::iovec; 2], u32) {
        let vectors = self.0.map(|span| libc::iovec {
            iov_base: span.start.cast(),
            iov_len: span.len,
        });
        (vectors, if self.0[1].len == 0 { 1 } else { 2 })
    }

    fn skip(self, bytes: usize) -> Self {
        let [first, second] = self.0;
        if bytes < first.len {
            Self([first.skip(bytes), second])
        } else {
            Self::one(second.skip(bytes - first.len))
        }
    }
}

/// What became of one attempt.
pub(super) enum Progress {
    /// Ask again with the operation as it is now.
    Again,
    Ended(io::Result<()>),
}

/// Takes the kernel's answer (bytes or negative errno) to one attempt of `op`, and moves `op` behind what was transferred.
pub(super) fn advance(op: &mut Op, answer: i32) -> Progress {
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
        let (mut first, mut second) = ([0; 8], [0; 8]);
        let spans = Spans([Span::of(&mut first), Span::of(&mut second)]);
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
        assert_eq!((op.offset, rest.len()), (112, 4));
        assert_eq!(rest.0[0].start, second.as_mut_ptr().wrapping_add(4));
        assert!(matches!(advance(&mut op, 4), Progress::Ended(Ok(()))));
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
