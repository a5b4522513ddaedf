// SPDX-License-Identifier: Apache-2.0
//! Moving the bytes of one stretch of pages.

/// Copies `num_bytes`; the pages of a stretch are adjacent on both sides.
///
/// # Safety
/// `source` is readable and `target` writable for `num_bytes`, they do not overlap, and nobody writes either meanwhile.
pub unsafe fn copy_stretch(source: *const u8, target: *mut u8, num_bytes: usize) {
    // SAFETY: as the caller promises.
    unsafe { core::ptr::copy_nonoverlapping(source, target, num_bytes) };
}
