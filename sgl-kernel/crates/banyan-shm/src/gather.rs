// SPDX-License-Identifier: Apache-2.0
//! Moving the bytes of one stretch of pages.
//!
//! A layer of a long prefix is larger than the caches, so it goes past them: streaming stores do not read the target before they overwrite it,
//! a third of the traffic of a plain copy. And while one stretch moves, the beginning of the next is asked for: what is scattered costs
//! address translations that one contiguous copy does not have.
//!
//! Which stores, and whether lines of the source are asked for ahead, is a matter of the processor: AMD's gain from asking, Intel's lose half
//! their rate by it (their own prefetchers are as far), and gain from stores of whole lines (docs/benchmarks/native.md).

/// A copy of adjacent pages from `source` to `target`.
#[derive(Clone, Copy)]
pub struct Piece {
    pub source: *const u8,
    pub target: *mut u8,
    pub num_bytes: usize,
}

/// Below this a streaming copy has nothing to win.
#[cfg(target_arch = "x86_64")]
const STREAM_FROM_BYTES: usize = 1024;

/// How long pieces are copied.
#[cfg(target_arch = "x86_64")]
enum Form {
    /// By whole lines (AVX-512).
    Lines,
    /// By halves of lines (AVX), the source being asked for ahead.
    Ahead,
}

/// Copies one piece, while `next` is on its way.
///
/// # Safety
/// `source` is readable and `target` writable for `num_bytes`, they do not overlap, and nobody writes either meanwhile. Before another thread
/// may read the target, `settle` is called.
pub unsafe fn copy_piece(piece: Piece, next: Option<Piece>) {
    #[cfg(target_arch = "x86_64")]
    if piece.num_bytes >= STREAM_FROM_BYTES {
        match *x86::FORM {
            // SAFETY: as the caller promises; the processor has AVX-512.
            Some(Form::Lines) => return unsafe { x86::stream_lines(piece, next) },
            // SAFETY: as the caller promises; the processor has AVX.
            Some(Form::Ahead) => return unsafe { x86::stream_ahead(piece, next) },
            None => {}
        }
    }
    let _ = next;
    // SAFETY: as the caller promises.
    unsafe { core::ptr::copy_nonoverlapping(piece.source, piece.target, piece.num_bytes) };
}

/// How long pieces are copied on this processor, in words. Elsewhere than on x86-64 the C library's copy, which streams by itself
/// where that pays, and whose stores the release of a page's record orders.
pub fn form() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    match *x86::FORM {
        Some(Form::Lines) => return "streaming stores (AVX-512)",
        Some(Form::Ahead) => return "streaming stores (AVX)",
        None => {}
    }
    "the C library's copy"
}

/// Orders streaming stores before whatever announces them.
pub fn settle() {
    #[cfg(target_arch = "x86_64")]
    x86::settle();
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::sync::LazyLock;

    use super::{Form, Piece};
    use core::arch::x86_64::*;

    /// A half of a line.
    const LANE: usize = size_of::<__m256i>();
    const LINE: usize = size_of::<__m512i>();
    /// How far ahead of the loads the source is asked for; whole steps.
    const AHEAD_BYTES: usize = 4096;
    /// Smallest unit with its own address translation.
    const PAGE_BYTES: usize = 4096;

    /// None: without AVX.
    pub static FORM: LazyLock<Option<Form>> = LazyLock::new(|| {
        let is_intel = __cpuid(0).ebx.to_le_bytes() == *b"Genu";
        if is_intel && is_x86_feature_detected!("avx512f") {
            return Some(Form::Lines);
        }
        is_x86_feature_detected!("avx").then_some(Form::Ahead)
    });

    /// The bytes before the first multiple of `unit` in the target, whole steps of four units, and what is left.
    fn parts(piece: Piece, unit: usize) -> [usize; 3] {
        let head = piece.target.align_offset(unit).min(piece.num_bytes);
        let body = (piece.num_bytes - head) / (4 * unit) * (4 * unit);
        [head, body, piece.num_bytes - head - body]
    }

    /// # Safety
    /// As `copy_piece`; the processor has AVX-512.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn stream_lines(piece: Piece, next: Option<Piece>) {
        let Piece { source, target, .. } = piece;
        translate(next);
        let [head, body, tail] = parts(piece, LINE);
        // SAFETY: head, body and tail partition the piece; streaming stores begin at a multiple of their width.
        unsafe {
            core::ptr::copy_nonoverlapping(source, target, head);
            let (from, to) = (source.add(head), target.add(head));
            for offset in (0..body).step_by(4 * LINE) {
                let lines = [0, 1, 2, 3]
                    .map(|line| _mm512_loadu_si512(from.add(offset + line * LINE).cast()));
                for (number, line) in lines.into_iter().enumerate() {
                    _mm512_stream_si512(to.add(offset + number * LINE).cast(), line);
                }
            }
            core::ptr::copy_nonoverlapping(from.add(body), to.add(body), tail);
        }
    }

    /// # Safety
    /// As `copy_piece`; the processor has AVX.
    #[target_feature(enable = "avx")]
    pub unsafe fn stream_ahead(piece: Piece, next: Option<Piece>) {
        let Piece { source, target, .. } = piece;
        translate(next);
        let [head, body, tail] = parts(piece, LANE);
        // The loads run on into the next piece as if it were adjacent: without a gap, and without asking for what nobody reads.
        let here = body.saturating_sub(AHEAD_BYTES);
        let next_source = next.map_or(source, |next| next.source);
        // SAFETY: head, body and tail partition the piece, `here` and what is left partition the body in whole steps; streaming stores
        // begin at a multiple of their width.
        unsafe {
            core::ptr::copy_nonoverlapping(source, target, head);
            let (from, to) = (source.add(head), target.add(head));
            stream_steps(from, to, here, from.add(body - here));
            stream_steps(from.add(here), to.add(here), body - here, next_source);
            core::ptr::copy_nonoverlapping(from.add(body), to.add(body), tail);
        }
    }

    /// Copies while asking for as many bytes at `ahead`.
    ///
    /// # Safety
    /// As `copy_piece`; `num_bytes` is a multiple of four lanes, `target` of `LANE`; the processor has AVX.
    #[target_feature(enable = "avx")]
    unsafe fn stream_steps(source: *const u8, target: *mut u8, num_bytes: usize, ahead: *const u8) {
        for offset in (0..num_bytes).step_by(4 * LANE) {
            prefetch(ahead.wrapping_add(offset));
            prefetch(ahead.wrapping_add(offset + 64));
            // SAFETY: `offset + 4 * LANE <= num_bytes`.
            unsafe {
                let from = source.add(offset);
                let to = target.add(offset);
                let lanes =
                    [0, 1, 2, 3].map(|lane| _mm256_loadu_si256(from.add(lane * LANE).cast()));
                _mm256_stream_si256(to.cast(), lanes[0]);
                _mm256_stream_si256(to.add(LANE).cast(), lanes[1]);
                _mm256_stream_si256(to.add(2 * LANE).cast(), lanes[2]);
                _mm256_stream_si256(to.add(3 * LANE).cast(), lanes[3]);
            }
        }
    }

    /// Touches each memory page at the beginning of a piece, so that its address translations are there when the bytes are wanted.
    fn translate(next: Option<Piece>) {
        let Some(next) = next else { return };
        for offset in (0..next.num_bytes.min(2 * PAGE_BYTES)).step_by(PAGE_BYTES) {
            prefetch(next.source.wrapping_add(offset));
            prefetch(next.target.wrapping_add(offset));
        }
    }

    fn prefetch(place: *const u8) {
        // SAFETY: a prefetch is a hint; it neither faults nor changes memory.
        unsafe { _mm_prefetch::<_MM_HINT_NTA>(place.cast()) };
    }

    pub fn settle() {
        // SAFETY: a fence; SSE is part of x86-64.
        unsafe { _mm_sfence() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_when_sizes_and_alignments_are_odd_then_exactly_the_piece() {
        let source: Vec<u8> = (0..9000u32).map(|number| (number * 7 + 1) as u8).collect();
        for (from, to, num_bytes) in [
            (0, 0, 4096),
            (3, 5, 1024),
            (1, 33, 8191),
            (7, 0, 1),
            (0, 9, 1151),
            (0, 0, 0),
        ] {
            let mut target = vec![0u8; 9000];
            let piece = Piece {
                source: source[from..].as_ptr(),
                target: target[to..].as_mut_ptr(),
                num_bytes,
            };
            for copy in forms() {
                // SAFETY: both slices are longer than the piece, and the processor has what the form needs.
                unsafe { copy(piece, Some(piece)) };
                settle();
                assert_eq!(target[to..to + num_bytes], source[from..from + num_bytes]);
                target[to..to + num_bytes].fill(0);
                assert!(target.iter().all(|byte| *byte == 0));
            }
        }
    }

    /// Every one that this processor can.
    fn forms() -> Vec<unsafe fn(Piece, Option<Piece>)> {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
        let mut forms: Vec<unsafe fn(Piece, Option<Piece>)> = vec![copy_piece];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx") {
                forms.push(x86::stream_ahead);
            }
            if is_x86_feature_detected!("avx512f") {
                forms.push(x86::stream_lines);
            }
        }
        forms
    }
}
