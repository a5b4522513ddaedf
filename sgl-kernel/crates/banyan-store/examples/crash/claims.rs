// SPDX-License-Identifier: Apache-2.0
//! What the workers said, and so what the store may be held to.
//!
//! Invariants
//! * A page counts as promised from the moment its worker heard that it is stored.
//! * A page that came back damaged or with an error is withdrawn by the I/O thread, possibly for good, before the reader hears of it:
//!   the power may be cut in between. So a worker names what it is going to read; from there until it names what failed, a device that
//!   can fail reads may have cost any of these pages.
//! * A worker that clears its shelf may have taken back, from there on, what it has put and what an earlier life has left; also what
//!   another one calls stored, who had met it there. When it says that this is done, what it has stored is gone until it is put again.
//! * A line of a manifest that does not verify has cost at most one page. It is counted before anybody adopts the shelf, which removes it.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use banyan_store::directory::Stripe;
use banyan_store::error::Result;
use banyan_store::format::{ENTRY_BYTES, Entry};
use banyan_store::geometry::BLOCK_BYTES;
use banyan_store::manifest::Follower;

/// One line of a worker's standard output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// These pages are about to be put: they may be stored without another word.
    Putting(Vec<u64>),
    /// The page is durable.
    Stored(u64),
    /// A read of these pages begins.
    Reading(Vec<u64>),
    /// The read is over; these pages failed.
    Failed(Vec<u64>),
    /// Lines of manifests that did not verify when the worker came.
    BadLines(usize),
    /// The worker begins to clear its shelf.
    Clearing,
    /// Its shelf is empty.
    Cleared,
}

impl Said {
    pub fn line(&self) -> String {
        let (word, numbers) = match self {
            Self::Putting(pages) => ("P", pages.clone()),
            Self::Stored(page) => ("S", vec![*page]),
            Self::Reading(pages) => ("R", pages.clone()),
            Self::Failed(pages) => ("F", pages.clone()),
            Self::BadLines(count) => ("B", vec![*count as u64]),
            Self::Clearing => ("C", vec![]),
            Self::Cleared => ("E", vec![]),
        };
        let numbers = numbers.iter().map(|number| format!(" {number}"));
        format!("{word}{}", numbers.collect::<String>())
    }

    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let word = words.next()?;
        let numbers: Option<Vec<u64>> = words.map(|number| number.parse().ok()).collect();
        match (word, &numbers?[..]) {
            ("P", pages) => Some(Self::Putting(pages.to_vec())),
            ("S", [page]) => Some(Self::Stored(*page)),
            ("R", pages) => Some(Self::Reading(pages.to_vec())),
            ("F", pages) => Some(Self::Failed(pages.to_vec())),
            ("B", [count]) => Some(Self::BadLines(*count as usize)),
            ("C", []) => Some(Self::Clearing),
            ("E", []) => Some(Self::Cleared),
            _ => None,
        }
    }
}

/// Whether the device of a life can make a read fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    Reliable,
    MayFail,
}

#[derive(Debug, Default)]
pub struct Claims {
    pub durable: BTreeSet<u64>,
    pub damaged: BTreeSet<u64>,
    /// Found when this life began: whoever has adopted them may clear them.
    inherited: BTreeSet<u64>,
    /// What a worker of this life may have taken back.
    taken: BTreeSet<u64>,
    /// Taken back, and not put by the same worker again.
    pub cleared: BTreeSet<u64>,
    pub num_bad_lines: usize,
}

impl Claims {
    /// Everything that one worker said in one life, in its order.
    pub fn take(&mut self, said: impl Iterator<Item = Said>, reads: Reads) {
        let mut unresolved = Vec::new();
        let (mut put, mut stored) = (BTreeSet::new(), BTreeSet::new());
        let mut taken = BTreeSet::new();
        let mut is_clearing = false;
        for said in said {
            match said {
                Said::Putting(pages) => {
                    self.cleared.retain(|page| !pages.contains(page));
                    put.extend(pages);
                }
                Said::Stored(page) => drop(stored.insert(page)),
                Said::Clearing => {
                    is_clearing = true;
                    taken.append(&mut self.inherited);
                    taken.extend(&put);
                }
                Said::Cleared => {
                    is_clearing = false;
                    self.cleared.append(&mut stored);
                }
                Said::Reading(pages) => unresolved = pages,
                Said::Failed(pages) => {
                    unresolved.clear();
                    self.damaged.extend(pages);
                }
                Said::BadLines(count) => self.num_bad_lines += count,
            }
        }
        if reads == Reads::MayFail {
            self.damaged.extend(unresolved);
        }
        self.durable.retain(|page| !taken.contains(page));
        if !is_clearing {
            self.durable.extend(stored.difference(&self.taken));
        }
        self.taken.append(&mut taken);
    }

    /// Promised pages that are not `found` and that no damage to their record explains.
    pub fn lost(&self, found: &BTreeSet<u64>) -> Vec<u64> {
        let unexplained = |page: &&u64| !found.contains(*page) && !self.damaged.contains(*page);
        self.durable.iter().filter(unexplained).copied().collect()
    }

    /// Pages that a lone worker has taken back and that are `found` all the same.
    pub fn back_again(&self, found: &BTreeSet<u64>) -> Vec<u64> {
        self.cleared.intersection(found).copied().collect()
    }

    /// A new life: what was `found` is what it starts from.
    pub fn settle(&mut self, found: BTreeSet<u64>) {
        *self = Self {
            durable: found.clone(),
            inherited: found,
            ..Self::default()
        };
    }
}

/// Lines of all manifests that are written and do not verify. Also the last one of a log, which the store cannot tell from a torn one;
/// here none is torn: sectors hold whole lines.
pub fn num_bad_lines(paths: &[PathBuf]) -> Result<usize> {
    let stripe = Stripe::open(paths)?;
    let mut num_bad = 0;
    for shelf in stripe.shelves()? {
        let Some(follower) = Follower::open(&stripe.shelf(shelf, 0))? else {
            continue;
        };
        // Replaced meanwhile by its living writer: the new one is written from memory.
        let bytes = fs::read(follower.path()).unwrap_or_default();
        let log = bytes.get(BLOCK_BYTES..).unwrap_or_default();
        let is_bad = |line: &&[u8]| {
            **line != [0; ENTRY_BYTES] && Entry::decode(follower.header.number, line).is_none()
        };
        num_bad += log.chunks_exact(ENTRY_BYTES).filter(is_bad).count();
    }
    Ok(num_bad)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use banyan_store::format::{FileHeader, Identity, Kind, NO_PARENT, Record};
    use banyan_store::geometry::Geometry;
    use banyan_store::manifest;

    use super::*;

    fn claims(said: &[&str], reads: Reads) -> Claims {
        let mut claims = Claims::default();
        claims.take(said.iter().filter_map(|line| Said::parse(line)), reads);
        claims
    }

    fn lost(said: &[&str], reads: Reads) -> Vec<u64> {
        claims(said, reads).lost(&BTreeSet::from([7]))
    }

    #[test]
    fn line_when_said_then_understood_and_a_cut_one_is_not() {
        for said in [
            Said::Putting(vec![3, 4]),
            Said::Stored(3),
            Said::Reading(vec![1, 2]),
            Said::Failed(vec![]),
            Said::Failed(vec![2]),
            Said::BadLines(1),
            Said::Clearing,
            Said::Cleared,
        ] {
            assert_eq!(Said::parse(&said.line()), Some(said));
        }
        for cut in ["", "S", "S ", "S x", "Q 1", "S 1 2"] {
            assert_eq!(Said::parse(cut), None, "{cut:?}");
        }
    }

    #[test]
    fn lines_when_bits_flipped_in_the_middle_and_at_the_end_then_both_counted_and_zeros_not() {
        let root = std::env::temp_dir().join(format!("banyan-claims-{}", std::process::id()));
        let stripe = Stripe::open_or_create(std::slice::from_ref(&root)).unwrap();
        let (shelf, _lock) = stripe.create_shelf().unwrap();
        let header = FileHeader {
            shelf,
            number: 3,
            sequence: 0,
            namespace: [1; 4],
            places_per_segment: 4,
            geometry: Geometry::new(&[100]).unwrap(),
        };
        let entries = (1..5).map(|sequence| Entry {
            sequence,
            kind: Kind::Publish,
            place: sequence as u32,
            record: Record {
                identity: Identity {
                    key: [sequence; 4],
                    namespace: [1; 4],
                    generation: sequence,
                },
                parent: NO_PARENT,
                checksum: 0,
            },
        });
        let (log, len) = manifest::replace(&stripe.shelf(shelf, 0), &header, entries).unwrap();
        log.set_len(len + 4096).unwrap();
        let before = num_bad_lines(stripe.paths()).unwrap();
        for line in [2, 4] {
            let at = len - line as u64 * ENTRY_BYTES as u64 + 40;
            log.write_all_at(&[0xAA], at).unwrap();
        }
        let after = num_bad_lines(stripe.paths()).unwrap();
        log.write_all_at(&[0xAA], len - ENTRY_BYTES as u64 + 40)
            .unwrap();
        let with_the_last = num_bad_lines(stripe.paths()).unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!((before, after, with_the_last), (0, 2, 3));
    }

    #[test]
    fn page_when_stored_and_not_found_then_lost() {
        assert_eq!(lost(&["S 96", "S 7"], Reads::Reliable), [96]);
        assert_eq!(lost(&["S 96", "S 7"], Reads::MayFail), [96]);
    }

    #[test]
    fn page_when_the_power_is_cut_before_its_reader_says_that_it_failed_then_not_held_against_the_store()
     {
        let said = ["S 96", "S 97", "R 96"];
        assert_eq!(lost(&said, Reads::MayFail), [97], "it was not being read");
        assert_eq!(
            lost(&said, Reads::Reliable),
            [96, 97],
            "nothing can have failed"
        );
    }

    #[test]
    fn page_when_its_read_is_over_then_excused_only_if_it_failed() {
        let said = ["S 96", "S 97", "R 96 97", "F 97", "R 7"];
        assert_eq!(lost(&said, Reads::MayFail), [96]);
    }

    #[test]
    fn page_when_cleared_then_not_lost_and_not_to_come_back_until_it_is_stored_again() {
        let said = |more: &[&'static str]| {
            let said = [&["P 96 7", "S 96", "S 7", "C"], more].concat();
            claims(&said, Reads::Reliable)
        };
        let cleared = said(&["E"]);
        assert_eq!(cleared.lost(&BTreeSet::new()), [0; 0]);
        assert_eq!(cleared.back_again(&BTreeSet::from([7, 8])), [7]);
        // It may be durable before the worker comes to say so.
        let put = said(&["E", "P 7"]);
        assert_eq!(put.lost(&BTreeSet::new()), [0; 0]);
        assert_eq!(put.back_again(&BTreeSet::from([7])), [0; 0]);
        assert_eq!(said(&["E", "P 7", "S 7"]).lost(&BTreeSet::new()), [7]);
        let killed = said(&[]);
        assert_eq!(killed.lost(&BTreeSet::new()), [0; 0], "nobody knows");
        assert_eq!(killed.back_again(&BTreeSet::from([96])), [0; 0]);
    }

    #[test]
    fn page_when_another_worker_that_put_it_too_has_cleared_then_not_lost_and_others_are() {
        let keeps = ["P 7 8", "S 7", "S 8"];
        let clears = ["P 7", "C", "E"];
        for order in [[&keeps, &clears], [&clears, &keeps]] {
            let mut claims = Claims::default();
            for said in order {
                let said = said.iter().filter_map(|line| Said::parse(line));
                claims.take(said, Reads::Reliable);
            }
            assert_eq!(claims.lost(&BTreeSet::new()), [8]);
        }
    }

    #[test]
    fn page_when_left_by_an_earlier_life_then_whoever_clears_may_have_taken_it_back() {
        for (said, expected) in [(&["C"][..], &[][..]), (&["S 8"], &[7])] {
            let mut claims = Claims::default();
            claims.settle(BTreeSet::from([7]));
            claims.take(
                said.iter().filter_map(|line| Said::parse(line)),
                Reads::Reliable,
            );
            assert_eq!(claims.lost(&BTreeSet::from([8])), expected);
        }
    }

    #[test]
    fn excuses_when_a_life_is_over_then_do_not_reach_into_the_next() {
        let mut claims = claims(&["S 7", "F 7", "B 2"], Reads::MayFail);
        claims.settle(BTreeSet::from([7]));
        assert_eq!(
            (claims.num_bad_lines, claims.lost(&BTreeSet::new())),
            (0, vec![7])
        );
    }
}
