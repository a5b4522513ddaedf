// SPDX-License-Identifier: Apache-2.0
//! Page keys of a prompt: SGLang's chained sha256 over the tokens of each page.
//!
//! A chain cannot be hashed in parallel, and 2,000 pages take a core longer than a dispatcher should take for all of its work. But
//! prompts come back, longer each time: so chunks of a chain that were hashed before are remembered, and recognised by comparing their
//! tokens.
//!
//! Where a draft model runs beside the model, row i of its cache depends on token i + 1 too. SGLang's keys are then made of bigrams, each
//! token with the one behind it: a page's key depends on one token more than the page has.
//!
//! A page in which a token has more than 32 bits is hashed in another form: a tag of one byte, then words of 64 bits. The number of bytes
//! is odd, so that no page of the usual form can have the same.
//!
//! Invariants
//! * The answer never depends on what is remembered: an entry counts only if its prior key and all of its tokens are equal.
//! * Bounded: one entry for each slot; a later chunk of the same slot takes its place.

use sha2::{Digest, Sha256};

use crate::error::{Result, invalid};
use crate::frame::Key;
use crate::words::{Tokens, Words};

/// What SGLang writes in front of a page of 64-bit words.
const WIDE_TAG: u8 = 0xff;

/// Pages that are hashed, remembered and looked up together.
pub const CHUNK_PAGES: usize = 32;

pub struct PageKeys {
    page_tokens: usize,
    tokens_ahead: usize,
    slots: Vec<Option<Box<Entry>>>,
}

struct Entry {
    prior: Option<Key>,
    tokens: Tokens,
    keys: Vec<Key>,
}

impl PageKeys {
    /// Remembers up to `num_chunks` chunks; each takes `CHUNK_PAGES` times 4 bytes a token and 32 bytes a page.
    /// `tokens_ahead`: how many tokens behind a page its key depends on: 0, or 1 for bigrams.
    pub fn new(page_tokens: usize, num_chunks: usize, tokens_ahead: usize) -> Result<Self> {
        if page_tokens == 0 {
            return invalid!("a page has at least one token");
        }
        if tokens_ahead > 1 {
            return invalid!("a key looks one token ahead at most, not {tokens_ahead}");
        }
        if !num_chunks.is_power_of_two() {
            return invalid!("{num_chunks} chunks: the number is a power of two");
        }
        let mut slots = Vec::new();
        slots.resize_with(num_chunks, || None);
        Ok(Self {
            page_tokens,
            tokens_ahead,
            slots,
        })
    }

    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    pub fn chunk_tokens(&self) -> usize {
        CHUNK_PAGES * self.page_tokens
    }

    /// `tokens` cut for `chunk`: what the pages of each depend on. The last one may hold no whole page.
    pub fn chunks<'a>(&self, tokens: Words<'a>) -> impl Iterator<Item = Words<'a>> + use<'a> {
        let (step, ahead) = (self.chunk_tokens(), self.tokens_ahead);
        let end = tokens.len();
        let starts = (0..end.saturating_sub(ahead)).step_by(step);
        starts.map(move |start| tokens.slice(start..(start + step + ahead).min(end)))
    }

    /// The keys of the whole pages of `tokens`, which follow the page of key `prior`: at most one of `chunks`.
    pub fn chunk(&mut self, prior: Option<&Key>, tokens: Words<'_>) -> &[Key] {
        let mut unbounded = usize::MAX;
        self.chunk_within(prior, tokens, &mut unbounded)
            .unwrap_or(&[])
    }

    /// The same; `None` when the chunk would have to be hashed and `left` chunks may be: it counts down.
    pub fn chunk_within(
        &mut self,
        prior: Option<&Key>,
        tokens: Words<'_>,
        left: &mut usize,
    ) -> Option<&[Key]> {
        debug_assert!(tokens.len() <= self.chunk_tokens() + self.tokens_ahead);
        let slot = mix(prior.map_or(1, |key| key[0]), tokens) as usize & (self.slots.len() - 1);
        let is_known = self.slots[slot]
            .as_ref()
            .is_some_and(|entry| entry.prior.as_ref() == prior && entry.tokens.words() == tokens);
        if !is_known {
            *left = left.checked_sub(1)?;
            self.slots[slot] = Some(Box::new(Entry {
                prior: prior.copied(),
                tokens: tokens.to_tokens(),
                keys: chain(prior, tokens, self.page_tokens, self.tokens_ahead),
            }));
        }
        self.slots[slot].as_ref().map(|entry| &entry.keys[..])
    }
}

/// What the key of each whole page depends on, page after page.
pub(crate) fn pages(
    tokens: Words<'_>,
    page_tokens: usize,
    tokens_ahead: usize,
) -> impl Iterator<Item = Words<'_>> {
    let num_pages = tokens.len().saturating_sub(tokens_ahead) / page_tokens;
    (0..num_pages)
        .map(move |page| page * page_tokens)
        .map(move |start| tokens.slice(start..start + page_tokens + tokens_ahead))
}

/// SGLang's page hash: sha256 of the key before, if there is one, and the page's tokens as little-endian 32-bit words, or the tag and
/// 64-bit words; of bigrams each token and the one behind it.
fn chain(
    prior: Option<&Key>,
    tokens: Words<'_>,
    page_tokens: usize,
    tokens_ahead: usize,
) -> Vec<Key> {
    let mut keys = Vec::with_capacity(tokens.len() / page_tokens);
    let mut prior = prior.copied();
    let mut text = Vec::with_capacity(32 + 4 * page_tokens * (1 + tokens_ahead));
    for page in pages(tokens, page_tokens, tokens_ahead) {
        text.clear();
        if let Some(key) = prior {
            text.extend(key.iter().flat_map(|word| word.to_le_bytes()));
        }
        write_page(&mut text, page, tokens_ahead);
        let digest = Sha256::digest(&text);
        let key = key_of(&digest.into());
        keys.push(key);
        prior = Some(key);
    }
    keys
}

fn write_page(text: &mut Vec<u8>, page: Words<'_>, tokens_ahead: usize) {
    // A window is a token and, of bigrams, the one behind it.
    let unit = 1 + tokens_ahead;
    let low = page.low().windows(unit).flatten();
    match page.high().map(|high| high.windows(unit).flatten()) {
        None if tokens_ahead == 0 => {
            text.extend(page.low().iter().flat_map(|token| token.to_le_bytes()));
        }
        None => text.extend(low.flat_map(|token| token.to_le_bytes())),
        Some(high) => {
            text.push(WIDE_TAG);
            let words = low.zip(high).flat_map(|(low, high)| [*low, *high]);
            text.extend(words.flat_map(u32::to_le_bytes));
        }
    }
}

/// A key from the 32 bytes of a digest.
pub fn key_of(digest: &[u8; 32]) -> Key {
    let mut key = Key::default();
    for (word, bytes) in key.iter_mut().zip(digest.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    key
}

pub(crate) fn step(lane: u64, word: u64) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    (lane ^ word).wrapping_mul(ODD).rotate_left(29)
}

/// A number that tokens after `start` have.
pub(crate) fn mix(start: u64, tokens: Words<'_>) -> u64 {
    let digest = mix_low(start, tokens.low());
    tokens.high().map_or(digest, |high| mix_low(digest, high))
}

/// Four independent chains, because one would wait for its multiplications.
fn mix_low(start: u64, tokens: &[u32]) -> u64 {
    let mut lanes = [start, start ^ 1, start ^ 2, start ^ 3];
    let wide = tokens.chunks_exact(8);
    let rest = wide.remainder();
    for eight in wide {
        for (lane, pair) in lanes.iter_mut().zip(eight.chunks_exact(2)) {
            *lane = step(*lane, u64::from(pair[0]) | u64::from(pair[1]) << 32);
        }
    }
    let tail = rest
        .iter()
        .fold(0, |tail, token| step(tail, u64::from(*token)));
    let digest = lanes.iter().fold(tail, |digest, lane| step(digest, *lane));
    digest ^ (digest >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tokens: &[u32]) -> Words<'_> {
        tokens.into()
    }

    fn wide(tokens: &[u64]) -> Tokens {
        let low = tokens.iter().map(|token| *token as u32).collect();
        let high = tokens.iter().map(|token| (token >> 32) as u32).collect();
        Tokens::new(low, Some(high))
    }

    fn hex(key: &Key) -> String {
        let bytes = key.iter().flat_map(|word| word.to_le_bytes());
        bytes.map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_page_hashes_as_its_little_endian_tokens() {
        let mut keys = PageKeys::new(2, 1, 0).unwrap();
        let found = keys.chunk(None, text(&[1, 2, 3, 4])).to_vec();
        let first: [u8; 32] = Sha256::digest([1, 0, 0, 0, 2, 0, 0, 0]).into();
        assert_eq!(found[0], key_of(&first));
        let mut second = first.to_vec();
        second.extend([3, 0, 0, 0, 4, 0, 0, 0]);
        let second: [u8; 32] = Sha256::digest(&second).into();
        assert_eq!(found[1], key_of(&second));
        assert_eq!(hex(&found[1]).len(), 64);
    }

    #[test]
    fn one_slot_that_all_chunks_share_never_gives_anothers_keys() {
        let mut crowded = PageKeys::new(2, 1, 0).unwrap();
        for round in 0..3 {
            for first in 0..20u32 {
                let tokens = [first, 7, 8, 9];
                let tokens = text(&tokens);
                for prior in [None, Some([u64::from(first); 4]), Some([1, 2, 3, 4])] {
                    let fresh = chain(prior.as_ref(), tokens, 2, 0);
                    assert_eq!(crowded.chunk(prior.as_ref(), tokens), fresh, "{round}");
                    assert_eq!(crowded.chunk(prior.as_ref(), tokens), fresh, "{round}");
                }
            }
        }
    }

    #[test]
    fn an_unfinished_page_has_no_key() {
        let mut keys = PageKeys::new(4, 8, 0).unwrap();
        assert_eq!(keys.chunk(None, text(&[1, 2, 3])).len(), 0);
        assert_eq!(keys.chunk(None, text(&[1, 2, 3, 4, 5])).len(), 1);
    }

    #[test]
    fn a_page_of_bigrams_hashes_each_token_with_the_one_behind_it() {
        let mut keys = PageKeys::new(2, 1, 1).unwrap();
        let found = keys.chunk(None, text(&[1, 2, 3, 4, 5])).to_vec();
        let bytes = |words: &[u8]| {
            words
                .iter()
                .flat_map(|word| [*word, 0, 0, 0])
                .collect::<Vec<_>>()
        };
        let first: [u8; 32] = Sha256::digest(bytes(&[1, 2, 2, 3])).into();
        assert_eq!(found[0], key_of(&first));
        let second = [&first[..], &bytes(&[3, 4, 4, 5])].concat();
        assert_eq!(found[1], key_of(&Sha256::digest(second).into()));
        // The last page is whole once the token behind it is known.
        assert_eq!(keys.chunk(None, text(&[1, 2, 3, 4])).len(), 1);
        assert_eq!(keys.chunk(None, text(&[1, 2])).len(), 0);
    }

    #[test]
    fn a_page_with_a_longer_token_hashes_as_a_tag_and_64_bit_words() {
        const IMAGE: u64 = 0x1234_5678_9abc_def0;
        let tokens = wide(&[1, 2, 3, IMAGE, IMAGE + 1, 5, 6, 7, 8]);
        let page = |prior: Option<&Key>, words: &[u64]| {
            let prior = prior
                .into_iter()
                .flatten()
                .flat_map(|word| word.to_le_bytes());
            let words = words.iter().flat_map(|word| word.to_le_bytes());
            let text: Vec<u8> = prior.chain([0xff]).chain(words).collect();
            key_of(&Sha256::digest(text).into())
        };
        let mut keys = PageKeys::new(2, 8, 0).unwrap();
        let found = keys.chunk(None, tokens.words()).to_vec();
        assert_eq!(found.len(), 4);
        assert_eq!(found[..1], keys.chunk(None, text(&[1, 2])).to_vec());
        assert_eq!(found[1], page(Some(&found[0]), &[3, IMAGE]));
        assert_eq!(found[2], page(Some(&found[1]), &[IMAGE + 1, 5]));
        assert_eq!(
            found[3..],
            keys.chunk(Some(&found[2]), text(&[6, 7])).to_vec()
        );
        // Of bigrams the one that looks ahead into the image is of the long form already.
        let mut keys = PageKeys::new(2, 8, 1).unwrap();
        let found = keys
            .chunk(None, wide(&[1, 2, IMAGE, 4, 5, 6, 7]).words())
            .to_vec();
        assert_eq!(found[0], page(None, &[1, 2, 2, IMAGE]));
        assert_eq!(found[1], page(Some(&found[0]), &[IMAGE, 4, 4, 5]));
        assert_eq!(
            found[2..],
            keys.chunk(Some(&found[1]), text(&[5, 6, 7])).to_vec()
        );
    }

    #[test]
    fn tokens_that_differ_above_32_bits_only_are_not_taken_for_each_other() {
        let mut crowded = PageKeys::new(2, 1, 0).unwrap();
        let (one, other) = (wide(&[7, 1 << 40]), wide(&[7, 1 << 41]));
        for tokens in [&one, &other, &one] {
            let fresh = chain(None, tokens.words(), 2, 0);
            assert_eq!(crowded.chunk(None, tokens.words()), fresh);
        }
        assert_ne!(mix(1, one.words()), mix(1, other.words()));
        let same_low: [u32; 2] = [7, 0];
        assert_ne!(
            crowded.chunk(None, text(&same_low)).to_vec(),
            chain(None, one.words(), 2, 0)
        );
    }

    #[test]
    fn chunks_hold_what_their_pages_depend_on_and_lose_no_page() {
        for tokens_ahead in [0, 1] {
            let mut keys = PageKeys::new(2, 64, tokens_ahead).unwrap();
            for len in [0, 1, 2, 3, 63, 64, 65, 66, 127, 128, 129, 130, 200] {
                let tokens: Vec<u32> = (0..len).collect();
                let whole = chain(None, text(&tokens), 2, tokens_ahead);
                assert_eq!(whole.len(), (len as usize).saturating_sub(tokens_ahead) / 2);
                let mut found: Vec<Key> = Vec::new();
                for chunk in keys.chunks(text(&tokens)) {
                    let prior = found.last().copied();
                    found.extend(keys.chunk(prior.as_ref(), chunk));
                }
                assert_eq!(found, whole, "{len} tokens, {tokens_ahead} ahead");
            }
        }
    }

    #[test]
    fn sizes_that_cannot_work_are_refused() {
        assert!(PageKeys::new(0, 8, 0).is_err());
        assert!(PageKeys::new(16, 0, 0).is_err());
        assert!(PageKeys::new(16, 9, 0).is_err());
        assert!(PageKeys::new(16, 8, 2).is_err());
    }
}
