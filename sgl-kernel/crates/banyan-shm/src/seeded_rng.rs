// SPDX-License-Identifier: Apache-2.0
//! Numbers that are the same in every run: SplitMix64 (Steele, Lea and Flood, 2014), from a fixed seed.

#[derive(Default)]
pub struct SeededRng(u64);

impl SeededRng {
    /// One of the first `count` numbers; of none, 0.
    #[allow(clippy::cast_possible_truncation)] // below `count`
    pub fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next()) * count as u128) >> 64) as usize
    }

    /// From 0 to 1.
    #[cfg(test)]
    #[allow(clippy::cast_precision_loss)] // 53 bits
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }
}

/// Its last step alone: another number for each, any of whose bits are a good hash.
pub fn mixed(number: u64) -> u64 {
    let mixed = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_drawn_about_as_often() {
        let (mut seeded_rng, mut drawn) = (SeededRng::default(), [0; 10]);
        for _ in 0..10_000 {
            drawn[seeded_rng.below(10)] += 1;
        }
        assert!(
            drawn.iter().all(|count| (900..1_100).contains(count)),
            "{drawn:?}"
        );
        assert_eq!(seeded_rng.below(0), 0);
    }
}
