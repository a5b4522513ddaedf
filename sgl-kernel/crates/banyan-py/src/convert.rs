// SPDX-License-Identifier: Apache-2.0
//! Values that cross the border, checked on the way in.

use std::io::ErrorKind;

use banyan_shm::error::ShmError;
use banyan_shm::frame::{FrameId, Key};
use banyan_shm::page_keys;
use banyan_shm::rank_table::Namespace;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOSError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";

pub fn to_py(error: ShmError) -> PyErr {
    match error {
        ShmError::Invalid(reason) => PyValueError::new_err(reason),
        ShmError::System { doing, cause } => match cause.raw_os_error() {
            // Two arguments make Python choose the subclass (FileNotFoundError ...) and fill errno.
            Some(errno) => PyOSError::new_err((errno, format!("{doing}: {cause}"))),
            None if cause.kind() == ErrorKind::TimedOut => PyTimeoutError::new_err(doing),
            None => PyOSError::new_err(format!("{doing}: {cause}")),
        },
    }
}

pub fn keys_of(keys: &Bound<'_, PyList>) -> PyResult<Vec<Key>> {
    let mut parsed = Vec::with_capacity(keys.len());
    for (position, key) in keys.iter().enumerate() {
        parsed.push(key_of(&key, position)?);
    }
    Ok(parsed)
}

/// The first and the last one; `None` of none.
pub fn ends_of(keys: &Bound<'_, PyList>) -> PyResult<Option<(Key, Key)>> {
    let Some(last) = keys.len().checked_sub(1) else {
        return Ok(None);
    };
    let key = |position| key_of(&keys.get_item(position)?, position);
    Ok(Some((key(0)?, key(last)?)))
}

/// `position`: where it stood, for whoever reads the error.
pub fn key_of(key: &Bound<'_, PyAny>, position: usize) -> PyResult<Key> {
    let text = key.cast::<PyString>().map_err(|_| {
        PyValueError::new_err(format!("key {position} is no str but {}", kind(key)))
    })?;
    let text = text.to_str()?;
    parse_key(text.as_bytes()).ok_or_else(|| {
        PyValueError::new_err(format!("key {position} is not 64 hex digits: {text:?}"))
    })
}

/// Thousands of keys cross in one lookup: without branches, so that the compiler makes vector code of it.
fn parse_key(text: &[u8]) -> Option<Key> {
    let text: &[u8; 64] = text.try_into().ok()?;
    let mut nibbles = [0u8; 64];
    let mut valid = true;
    for (nibble, character) in nibbles.iter_mut().zip(text) {
        let digit = character.wrapping_sub(b'0');
        let letter = (character | 0x20).wrapping_sub(b'a');
        valid &= (digit < 10) | (letter < 6);
        *nibble = if digit < 10 {
            digit
        } else {
            letter.wrapping_add(10)
        };
    }
    let mut bytes = [0u8; 32];
    for (byte, pair) in bytes.iter_mut().zip(nibbles.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    let word = |index: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[index * 8..][..8]);
        u64::from_le_bytes(word)
    };
    valid.then(|| [0, 1, 2, 3].map(word))
}

/// Frame numbers from a C-contiguous int64 buffer.
pub fn frames_of(frames: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let refuse = || {
        PyValueError::new_err(format!(
            "frames must be a C-contiguous buffer of int64, not {}",
            kind(frames)
        ))
    };
    // An empty array.array lies nowhere in particular, not even aligned: no typed view of it can be had.
    if frames.len().is_ok_and(|len| len == 0) {
        return Ok(Vec::new());
    }
    let buffer = PyBuffer::<i64>::get(frames).map_err(|_| refuse())?;
    if !buffer.is_c_contiguous() || buffer.dimensions() > 1 {
        return Err(refuse());
    }
    buffer.to_vec(frames.py())
}

/// From `bytes` of little-endian int64.
pub fn words_from(bytes: &[u8]) -> PyResult<Vec<u64>> {
    if !bytes.len().is_multiple_of(8) {
        let len = bytes.len();
        return Err(PyValueError::new_err(format!(
            "{len} bytes are no words of 64 bits"
        )));
    }
    let word = |chunk: &[u8]| u64::from_le_bytes(chunk.try_into().unwrap_or_default());
    Ok(bytes.chunks_exact(8).map(word).collect())
}

/// As `bytes` of little-endian int64.
pub fn words_to_py<'py>(
    py: Python<'py>,
    words: impl ExactSizeIterator<Item = u64>,
) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, words.len() * 8, |bytes| {
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Ok(())
    })
}

/// As `frames_of`, for frames that must at least be frame numbers.
pub fn targets_of(frames: &Bound<'_, PyAny>) -> PyResult<Vec<FrameId>> {
    let number = |frame: i64| {
        FrameId::try_from(frame)
            .map_err(|_| PyValueError::new_err(format!("frame {frame} is no frame number")))
    };
    frames_of(frames)?.into_iter().map(number).collect()
}

pub fn frames_to_py<'py>(py: Python<'py>, frames: &[FrameId]) -> PyResult<Bound<'py, PyBytes>> {
    words_to_py(py, frames.iter().map(|frame| u64::from(*frame)))
}

pub fn namespace_of(bytes: &[u8]) -> PyResult<Namespace> {
    let bytes: &[u8; 32] = bytes.try_into().map_err(|_| {
        PyValueError::new_err(format!("a namespace has 32 bytes, not {}", bytes.len()))
    })?;
    Ok(page_keys::key_of(bytes))
}

/// Of a namespace or a key.
pub fn hex_of(words: &[u64; 4]) -> String {
    let digits = digits_of(words);
    digits.iter().map(|digit| char::from(*digit)).collect()
}

/// A key as SGLang writes it. Thousands cross for one prompt.
pub fn key_to_py<'py>(py: Python<'py>, key: &Key) -> PyResult<Bound<'py, PyString>> {
    PyString::from_bytes(py, &digits_of(key))
}

fn digits_of(words: &[u64; 4]) -> [u8; 64] {
    let mut digits = [0; 64];
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    for (pair, byte) in digits.chunks_exact_mut(2).zip(bytes) {
        pair[0] = HEX_DIGITS[usize::from(byte >> 4)];
        pair[1] = HEX_DIGITS[usize::from(byte & 15)];
    }
    digits
}

pub fn kind(object: &Bound<'_, PyAny>) -> String {
    let name = object.get_type().name();
    name.map_or_else(|_| "something else".into(), |name| name.to_string())
}
