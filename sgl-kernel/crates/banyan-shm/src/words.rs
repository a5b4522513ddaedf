// SPDX-License-Identifier: Apache-2.0
//! The tokens of a prompt. Nearly all have 32 bits. Where an image, a video or a sound stands, SGLang writes numbers of up to 63 bits,
//! made of its content; what makes a number longer is kept apart, so that other prompts neither carry nor look at it.
//!
//! Invariants
//! * `high` is `None` exactly where all tokens have 32 bits: equal tokens have one form, wherever they were cut from.

use std::ops::Range;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    low: Vec<u32>,
    high: Option<Vec<u32>>,
}

/// Some of the tokens of a prompt, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words<'a> {
    low: &'a [u32],
    high: Option<&'a [u32]>,
}

impl Tokens {
    /// From the low halves of 64-bit words and, unless they are all zero, the high ones.
    pub fn new(low: Vec<u32>, high: Option<Vec<u32>>) -> Self {
        debug_assert!(high.as_ref().is_none_or(|high| high.len() == low.len()));
        Self {
            low,
            high: high.filter(|high| is_any(high)),
        }
    }

    pub fn words(&self) -> Words<'_> {
        Words {
            low: &self.low,
            high: self.high.as_deref(),
        }
    }
}

impl<'a> Words<'a> {
    pub fn len(&self) -> usize {
        self.low.len()
    }

    pub fn is_empty(&self) -> bool {
        self.low.is_empty()
    }

    pub fn slice(&self, range: Range<usize>) -> Self {
        let high = self.high.map(|high| &high[range.clone()]);
        Self {
            low: &self.low[range],
            high: high.filter(|high| is_any(high)),
        }
    }

    pub fn to_tokens(&self) -> Tokens {
        Tokens {
            low: self.low.to_vec(),
            high: self.high.map(<[u32]>::to_vec),
        }
    }

    /// Of each token the low 32 bits.
    pub fn low(&self) -> &'a [u32] {
        self.low
    }

    /// Of each token the bits above them, where one has any.
    pub fn high(&self) -> Option<&'a [u32]> {
        self.high
    }
}

impl<'a> From<&'a [u32]> for Words<'a> {
    fn from(low: &'a [u32]) -> Self {
        Self { low, high: None }
    }
}

fn is_any(high: &[u32]) -> bool {
    high.iter().any(|word| *word != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_tokens_are_equal_wherever_they_were_cut_from() {
        let with_image = Tokens::new(vec![1, 2, 3, 4], Some(vec![0, 0, 9, 0]));
        let text = Tokens::new(vec![1, 2, 3, 4], None);
        assert_ne!(with_image, text);
        assert_eq!(with_image.words().slice(0..2), text.words().slice(0..2));
        assert_eq!(with_image.words().slice(3..4), text.words().slice(3..4));
        assert_ne!(with_image.words().slice(1..3), text.words().slice(1..3));
        assert_eq!(
            Tokens::new(vec![1], Some(vec![0])),
            Tokens::new(vec![1], None)
        );
        assert_eq!(with_image.words().to_tokens(), with_image);
    }
}
