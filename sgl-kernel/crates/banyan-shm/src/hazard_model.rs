// SPDX-License-Identifier: Apache-2.0
//! How likely a page is to be wanted, by its age and by how often it was asked for: two powers that are learnt.
//!
//! Which of the two tells more depends on the work. A conversation that grows comes back soon or never: age says nearly
//! all. Prompts of many conversations in turn come back as often as they did before, however long that is ago: the
//! number of accesses says nearly all. Prompts that come round one after the other are the likelier the longer they are
//! away.
//!
//! So nothing is assumed but the form, `age ^ age_power * num_accesses ^ frequency_power`. Whenever a page comes back,
//! it is compared with one that might have come and did not, drawn at random. The powers move, so that the page that
//! came would have been taken for the likelier one, and the more the less it was. This is the partial likelihood of
//! Cox's proportional hazards (1972), with one control for each event, climbed one step at a time.
//!
//! Invariants
//! * The powers stay within `MOST_POWER` of nothing.
//! * A step takes the same time whatever was learnt before.

/// Pages younger than this are equally young, and older ones equally old: what is remembered does not reach further.
const LEAST_AGE_POOLS: f64 = 1.0 / 64.0;
const MOST_AGE_POOLS: f64 = 16.0;

/// See docs/design/0014.
const STEP: f64 = 0.05;

const MOST_POWER: f64 = 4.0;

/// A page as it was before a prompt came. `age_pools`: pages asked for since, over those of the pool.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub age_pools: f64,
    pub num_accesses: u64,
}

impl Seen {
    fn age(self) -> f64 {
        self.age_pools.clamp(LEAST_AGE_POOLS, MOST_AGE_POOLS)
    }

    #[allow(clippy::cast_precision_loss)] // accesses are counted to eight
    fn accesses(self) -> f64 {
        self.num_accesses as f64
    }
}

#[derive(Debug, PartialEq)]
pub struct HazardModel {
    pub age_power: f64,
    pub frequency_power: f64,
}

/// What suits both growing conversations and a hot set: the younger, the likelier, and a page that was asked for four
/// times as likely as one that is half as old.
impl Default for HazardModel {
    fn default() -> Self {
        Self {
            age_power: -1.0,
            frequency_power: 0.5,
        }
    }
}

impl HazardModel {
    /// Of being wanted next, as against other pages.
    pub fn of(&self, seen: Seen) -> f64 {
        seen.age().powf(self.age_power) * seen.accesses().powf(self.frequency_power)
    }

    /// `wanted` has come back and `other` has not.
    pub fn came(&mut self, wanted: Seen, other: Seen) {
        let older = (wanted.age() / other.age()).ln();
        let oftener = (wanted.accesses() / other.accesses()).ln();
        let surprise =
            1.0 / (1.0 + (self.age_power * older + self.frequency_power * oftener).exp());
        let bounded = |power: f64| power.clamp(-MOST_POWER, MOST_POWER);
        self.age_power = bounded(self.age_power + STEP * surprise * older);
        self.frequency_power = bounded(self.frequency_power + STEP * surprise * oftener);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded_rng::SeededRng;

    fn seen(age_pools: f64, num_accesses: u64) -> Seen {
        Seen {
            age_pools,
            num_accesses,
        }
    }

    /// Of two pages with ages and accesses at random, each came by a chance in proportion to its weight.
    fn learnt(num_lessons: usize, weight: impl Fn(Seen) -> f64) -> HazardModel {
        let (mut seeded_rng, mut hazard_model) = (SeededRng::default(), HazardModel::default());
        for _ in 0..num_lessons {
            let [one, other] =
                [(); 2].map(|()| seen(seeded_rng.share() * 4.0, 1 + seeded_rng.below(8) as u64));
            let is_one = seeded_rng.share() * (weight(one) + weight(other)) < weight(one);
            let (wanted, left) = if is_one { (one, other) } else { (other, one) };
            hazard_model.came(wanted, left);
        }
        hazard_model
    }

    #[test]
    fn when_nothing_was_learnt_the_younger_and_the_oftener_asked_for_are_likelier() {
        let hazard_model = HazardModel::default();
        assert!(hazard_model.of(seen(0.1, 1)) > hazard_model.of(seen(0.2, 1)));
        assert!((hazard_model.of(seen(0.2, 4)) / hazard_model.of(seen(0.1, 1)) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn work_that_has_powers_of_its_own_teaches_these() {
        let hazard_model = learnt(4_000, |seen| {
            seen.age().powf(0.8) * seen.accesses().powf(-1.5)
        });
        assert!(
            (hazard_model.age_power - 0.8).abs() < 0.4,
            "{hazard_model:?}"
        );
        assert!(
            (hazard_model.frequency_power + 1.5).abs() < 0.4,
            "{hazard_model:?}"
        );
    }

    #[test]
    fn work_in_which_neither_tells_anything_teaches_that() {
        let hazard_model = learnt(4_000, |_| 1.0);
        assert!(hazard_model.age_power.abs() < 0.4, "{hazard_model:?}");
        assert!(hazard_model.frequency_power.abs() < 0.4, "{hazard_model:?}");
    }

    #[test]
    fn hardly_anything_is_learnt_from_what_was_expected() {
        let (mut expected, mut surprising) = (HazardModel::default(), HazardModel::default());
        expected.came(seen(0.02, 1), seen(4.0, 1));
        surprising.came(seen(4.0, 1), seen(0.02, 1));
        assert!((-1.01..-1.0).contains(&expected.age_power), "{expected:?}");
        assert!(surprising.age_power > -0.8, "{surprising:?}");
    }

    #[test]
    fn powers_are_bounded_when_it_is_always_the_same() {
        let mut hazard_model = HazardModel::default();
        for _ in 0..100_000 {
            hazard_model.came(seen(MOST_AGE_POOLS, 8), seen(0.0, 1));
        }
        assert!(hazard_model.age_power <= MOST_POWER && hazard_model.frequency_power <= MOST_POWER);
        assert!(hazard_model.of(seen(0.0, 1)) > 0.0);
    }

    #[test]
    #[allow(clippy::float_cmp)] // the same arithmetic on the same numbers
    fn a_page_younger_or_older_than_what_counts_is_as_likely_as_that() {
        let hazard_model = HazardModel::default();
        let of = |age_pools| hazard_model.of(seen(age_pools, 1));
        assert_eq!(of(0.0), of(LEAST_AGE_POOLS));
        assert_eq!(of(1e9), of(MOST_AGE_POOLS));
    }
}
