// SPDX-License-Identifier: Apache-2.0
//! Trouble that lasts is not said every time that it is met.

use std::time::{Duration, Instant};

/// The same words are said again after this.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// What was said last, and when.
#[derive(Default)]
pub struct Said(Option<(String, Instant)>);

impl Said {
    /// Whether these words are to be said now.
    pub fn is_new(&mut self, words: &str, now: Instant) -> bool {
        let is_said = |(said, at): &(String, Instant)| said == words && now - *at < SAY_AGAIN;
        let is_new = !self.0.as_ref().is_some_and(is_said);
        if is_new {
            self.0 = Some((words.into(), now));
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_when_they_are_the_same_then_said_once_a_minute() {
        let mut said = Said::default();
        let start = Instant::now();
        assert!(said.is_new("the drive is gone", start));
        assert!(!said.is_new("the drive is gone", start + SAY_AGAIN / 2));
        assert!(said.is_new("no space", start + SAY_AGAIN / 2));
        assert!(!said.is_new("no space", start + SAY_AGAIN));
        assert!(said.is_new("no space", start + SAY_AGAIN * 2));
    }
}
