// SPDX-License-Identifier: Apache-2.0
//! A prompt as it is hashed, and the prefix fingerprint by which prompts are compared when neither is at hand any more.

use std::sync::Arc;

use crate::frame::Key;
use crate::page_keys::{mix, pages, step};
use crate::words::Tokens;

#[derive(Clone, Debug, Default)]
pub struct Prompt {
    /// What the first page is chained to. Prompts with different ones have nothing in common.
    pub prior: Option<Key>,
    pub tokens: Tokens,
}

impl Prompt {
    /// `tokens_ahead` as in `PageKeys`.
    pub fn prefix_fingerprint(&self, page_tokens: usize, tokens_ahead: usize) -> PrefixFingerprint {
        let mut id = self.prior.map_or(1, |key| key[0]);
        PrefixFingerprint {
            ids: pages(self.tokens.words(), page_tokens, tokens_ahead)
                .map(|page| {
                    // Only this step waits for the page before; the processor mixes several pages at a time.
                    id = step(id, mix(1, page));
                    id
                })
                .collect(),
        }
    }
}

/// One number for each whole page, which depends on all pages before it: an eighth of the tokens' memory at 16 tokens a
/// page.
///
/// For advice, not for content: two prefix fingerprints may meet by chance, once in 2^64, and by intent of whoever
/// makes the prompts.
///
/// A clone is the same prefix fingerprint. Length and place of the ids lie in it: of hundreds that are compared, each
/// costs one look at memory far away.
#[derive(Clone, Debug)]
pub struct PrefixFingerprint {
    ids: Arc<[u64]>,
}

impl PrefixFingerprint {
    pub fn num_pages(&self) -> usize {
        self.ids.len()
    }

    /// The most leading pages that it has in common with one of `others`.
    pub fn most_in_common<'a>(&self, others: impl IntoIterator<Item = &'a Self>) -> usize {
        let mut most = 0;
        for other in others {
            let num_pages = self.ids.len().min(other.ids.len());
            // Prefix fingerprints that meet at a page have met at all before it.
            let meets = |page: usize| page < num_pages && self.ids[page] == other.ids[page];
            if !meets(most) {
                continue;
            }
            let (mut common, mut apart) = (most + 1, num_pages);
            while common < apart {
                let middle = common + (apart - common) / 2;
                if meets(middle) {
                    common = middle + 1;
                } else {
                    apart = middle;
                }
            }
            most = common;
        }
        most
    }
}

impl PrefixFingerprint {
    /// Whether the first `num_pages` are those of `other`.
    pub fn begins_as(&self, other: &Self, num_pages: usize) -> bool {
        // Prefix fingerprints that meet at a page have met at all before it.
        num_pages == 0
            || self
                .ids
                .get(num_pages - 1)
                .is_some_and(|id| other.ids.get(num_pages - 1) == Some(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 16;

    fn prefix_fingerprint(tokens: impl IntoIterator<Item = u32>) -> PrefixFingerprint {
        let tokens = Tokens::new(tokens.into_iter().collect(), None);
        Prompt {
            prior: None,
            tokens,
        }
        .prefix_fingerprint(PAGE, 0)
    }

    #[test]
    fn the_common_part_ends_with_the_page_before_one_differs_or_ends() {
        let long = prefix_fingerprint(0..5000);
        for end in [0, 1, 15, 16, 17, 1023, 2048, 4991, 4992, 5000] {
            let num_pages = end as usize / PAGE;
            assert_eq!(
                long.most_in_common([&prefix_fingerprint(0..end)]),
                num_pages
            );
            let parted = prefix_fingerprint((0..end).chain([7_777_777]).chain(0..50));
            assert_eq!(long.most_in_common([&parted]), num_pages);
            assert_eq!(parted.most_in_common([&long]), num_pages);
        }
    }

    #[test]
    fn equal_pages_behind_different_ones_are_not_equal() {
        let one = prefix_fingerprint((0..16).chain(100..400));
        assert_eq!(
            one.most_in_common([&prefix_fingerprint((1..17).chain(100..400))]),
            0
        );
        assert_eq!(one.most_in_common([&one]), 19);
    }

    #[test]
    fn pages_of_bigrams_are_in_common_only_with_the_token_behind_them() {
        let prefix_fingerprint = |tokens: &[u32]| {
            let tokens = Tokens::new(tokens.to_vec(), None);
            Prompt {
                prior: None,
                tokens,
            }
            .prefix_fingerprint(2, 1)
        };
        let asked = prefix_fingerprint(&[1, 2, 3, 4, 5]);
        assert_eq!(asked.num_pages(), 2);
        assert_eq!(
            asked.most_in_common([&prefix_fingerprint(&[1, 2, 3, 4, 5])]),
            2
        );
        assert_eq!(
            asked.most_in_common([&prefix_fingerprint(&[1, 2, 3, 4, 6])]),
            1
        );
        assert_eq!(
            asked.most_in_common([&prefix_fingerprint(&[1, 2, 3, 4])]),
            1
        );
        assert_eq!(asked.most_in_common([&prefix_fingerprint(&[1, 2])]), 0);
    }

    #[test]
    fn prompts_of_one_text_part_where_their_images_differ() {
        let with = |image: u32| {
            let mut high = vec![0; 64];
            high[32..40].fill(image);
            Prompt {
                prior: None,
                tokens: Tokens::new((0..64).collect(), Some(high)),
            }
            .prefix_fingerprint(PAGE, 0)
        };
        assert_eq!(with(1).most_in_common([&with(1)]), 4);
        assert_eq!(with(1).most_in_common([&with(2)]), 2);
        assert_eq!(with(1).most_in_common([&prefix_fingerprint(0..64)]), 2);
        assert_eq!(with(0).most_in_common([&prefix_fingerprint(0..64)]), 4);
    }

    #[test]
    fn another_start_of_the_chain_is_another_prompt() {
        let salted = Prompt {
            prior: Some([2; 4]),
            tokens: Tokens::new((0..32).collect(), None),
        };
        let salted = salted.prefix_fingerprint(PAGE, 0);
        assert_eq!(prefix_fingerprint(0..32).most_in_common([&salted]), 0);
        assert_eq!(salted.most_in_common([&salted]), 2);
    }

    #[test]
    fn a_prefix_fingerprint_begins_as_another_up_to_where_they_part_and_no_further_than_either_goes()
     {
        let (one, other) = (
            prefix_fingerprint(0..160),
            prefix_fingerprint((0..96).chain(200..300)),
        );
        assert!((0..=6).all(|num_pages| one.begins_as(&other, num_pages)));
        assert!(!one.begins_as(&other, 7));
        assert!(one.begins_as(&one, 10) && !one.begins_as(&one, 11));
        assert!(!one.begins_as(&prefix_fingerprint(0..48), 4));
    }

    #[test]
    fn of_many_the_longest_counts_in_whatever_order_they_come() {
        let asked = prefix_fingerprint(0..1600);
        let mut others = vec![
            prefix_fingerprint(0..640),
            prefix_fingerprint(0..48),
            prefix_fingerprint(800..1600),
            prefix_fingerprint((0..960).chain(0..99)),
        ];
        for _ in 0..others.len() {
            assert_eq!(asked.most_in_common(&others), 60);
            others.rotate_left(1);
        }
        assert_eq!(asked.most_in_common([]), 0);
    }
}
