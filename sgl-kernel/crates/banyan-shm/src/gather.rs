// SPDX-License-Identifier: Apache-2.0
//! Moving the bytes of one stretch of pages.
//!
//! A layer of a long prefix is larger than the caches, so it goes past them: streaming stores do not read the target before they overwrite it,
//! a third of the traffic of a plain copy. And while one stretch moves, the beginning of the next is asked for: what is scattered costs
//! address translations that one contiguous copy does not have.

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

/// Copies one piece, while `next` is on its way.
///
/// # Safety
/// `source` is readable and `target` writable for `num_bytes`, they do not overlap, and nobody writes either meanwhile. Before another thread
/// may read the target, `settle` is called.
pub unsafe fn copy_piece(piece: Piece, next: Option<Piece>) {
    #[cfg(target_arch = "x86_64")]
    if piece.num_bytes >= STREAM_FROM_BYTES && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: as the caller promises; AVX was just detected.
        return unsafe { x86::stream(piece, next) };
    }
    let _ = next;
    // SAFETY: as the caller promises.
    unsafe { core::ptr::copy_nonoverlapping(piece.source, piece.target, piece.num_bytes) };
}

/// How long pieces are copied on this processor, in words. Elsewhere than on x86-64 the C library's copy, which streams by itself
/// where that pays, and whose stores the release of a page's record orders.
pub fn form() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        return "streaming stores (AVX)";
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
    use super::Piece;
    use core::arch::x86_64::*;

    const LANE: usize = size_of::<__m256i>();
    const STEP: usize = 4 * LANE;
    /// How far ahead of the loads the source is asked for; whole steps.
    const AHEAD_BYTES: usize = 4096;
    /// Smallest unit with its own address translation.
    const PAGE_BYTES: usize = 4096;

    /// # Safety
    /// As `copy_piece`; the processor has AVX.
    #[target_feature(enable = "avx")]
    pub unsafe fn stream(piece: Piece, next: Option<Piece>) {
        let Piece {
            source,
            target,
            num_bytes,
        } = piece;
        if let Some(next) = next {
            translate(next);
        }
        let head = target.align_offset(LANE).min(num_bytes);
        let body = (num_bytes - head) / STEP * STEP;
        let tail = num_bytes - head - body;
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
    /// As `copy_piece`; `num_bytes` is a multiple of `STEP`, `target` of `LANE`; the processor has AVX.
    #[target_feature(enable = "avx")]
    unsafe fn stream_steps(source: *const u8, target: *mut u8, num_bytes: usize, ahead: *const u8) {
        for offset in (0..num_bytes).step_by(STEP) {
            prefetch(ahead.wrapping_add(offset));
            prefetch(ahead.wrapping_add(offset + 64));
            // SAFETY: `offset + STEP <= num_bytes`.
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
    fn translate(next: Piece) {
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
            // SAFETY: both slices are longer than the piece.
            unsafe { copy_piece(piece, Some(piece)) };
            settle();
            assert_eq!(target[to..to + num_bytes], source[from..from + num_bytes]);
            assert!(
                target[..to]
                    .iter()
                    .chain(&target[to + num_bytes..])
                    .all(|byte| *byte == 0)
            );
        }
    }
}
