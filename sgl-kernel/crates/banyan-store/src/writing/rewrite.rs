// SPDX-License-Identifier: Apache-2.0
//! A manifest of the next epoch, when the log has grown long or can no longer be trusted.

use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::Instant;

use super::{Commit, REST, Surroundings, Writer};
use crate::error::{StoreError, found_no_space, invalid};
use crate::format::{Entry, FileHeader, Kind, Record};
use crate::geometry::Place;
use crate::manifest;
use crate::shared::{PAUSE, SLICE, Shared};

impl Writer {
    /// A new manifest is wanted, for a clear or a new namespace, or before anything else is written.
    pub(super) fn renew(&mut self, around: &Surroundings<'_>) {
        if matches!(self.commit, Commit::Idle)
            && (around.shared.lock().wants_manifest || self.hold.mark.check().is_err())
        {
            self.rewrite(around);
        }
    }

    /// Writes what is published to a manifest of the next epoch, on a thread of its own: for a large shelf it takes a while.
    pub(super) fn rewrite(&mut self, around: &Surroundings<'_>) {
        let (namespace, retired, num_published) = {
            let mut state = around.shared.lock();
            let own = state.own.as_ref();
            let num_published = own.map_or(0, |own| own.places.num_published());
            state.wants_manifest = false;
            state.counters.manifest_rewrites += 1;
            (state.namespace, state.take_retired(), num_published)
        };
        let header = FileHeader {
            number: self.header.number + 1,
            sequence: self.sequence,
            namespace,
            ..self.header.clone()
        };
        let first = self.sequence + 1;
        // Fewer may be left when they are written, never more: nothing is published during a rewrite.
        self.sequence += num_published as u64;
        let directory = around.shared.stripe.shelf(header.shelf, 0);
        let epoch = header.number;
        let (sender, result) = channel();
        let shared = around.shared.clone();
        let mark = self.hold.mark.clone();
        let work =
            move || {
                let entries = published(&shared).into_iter().zip(first..).map(
                    |((place, record), sequence)| Entry {
                        sequence,
                        kind: Kind::Publish,
                        place,
                        record,
                    },
                );
                let replaced = mark
                    .confirm()
                    .and_then(|()| manifest::replace(&directory, &header, entries));
                // Nobody receives when the store was closed meanwhile.
                drop(sender.send(replaced));
                shared.wake();
            };
        self.commit = Commit::Rewriting {
            result,
            epoch,
            retired,
        };
        let builder = thread::Builder::new().name("banyan-store-manifest".into());
        // A thread that cannot be started drops the sender, which reads as a failure.
        drop(builder.spawn(work));
    }

    pub(super) fn take_manifest(&mut self, around: &mut Surroundings<'_>) {
        let Commit::Rewriting { result, .. } = &self.commit else {
            return;
        };
        let answer = match result.try_recv() {
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => None,
            Ok(answer) => Some(answer),
        };
        let Commit::Rewriting { epoch, retired, .. } =
            std::mem::replace(&mut self.commit, Commit::Idle)
        else {
            unreachable!("checked above")
        };
        let replaced = match answer {
            Some(Ok((file, len))) => around
                .device
                .add_file(Arc::new(file))
                .map(|file| (file, len))
                .map_err(|cause| StoreError::os("cannot hand it to the device", cause)),
            Some(Err(error)) => Err(error),
            None => invalid!("no thread could be started"),
        };
        // Whether or not it got its name: the next one has to be newer.
        self.header.number = epoch;
        match replaced {
            Ok((file, len)) => {
                around.device.remove_file(self.log);
                self.log = file;
                self.log_bytes = len;
                self.log_allocated = len;
                let limbo = std::mem::take(&mut self.limbo);
                let mut state = around.shared.lock();
                state.has_no_manifest = false;
                if let Some(own) = &mut state.own {
                    own.places.cooled(retired.iter().map(|(place, _)| *place));
                    limbo
                        .into_iter()
                        .for_each(|place| own.places.give_up(place));
                }
                drop(state);
                around.shared.announce();
            }
            Err(error) => {
                if self
                    .said_of_manifest
                    .is_new(&error.to_string(), Instant::now())
                {
                    banyan_shm::say!(
                        "banyan: the store's manifest cannot be written ({error}): no writes for {REST:?}"
                    );
                }
                let mut state = around.shared.lock();
                state.has_no_manifest = true;
                state.counters.no_space_pauses += u64::from(found_no_space(&error));
                if let Some(own) = &mut state.own {
                    own.places.put_back_retired(retired);
                }
                self.commit = Commit::Resting(Instant::now() + REST);
            }
        }
    }
}

/// What is published, the oldest first. What is retired meanwhile may be among it: its entry comes behind, in the log.
fn published(shared: &Shared) -> Vec<(Place, Record)> {
    let mut records: Vec<(Place, Record)> = Vec::new();
    let mut first = 0;
    loop {
        if let Some(own) = &shared.lock().own
            && first < own.places.end()
        {
            let slice = own.places.published_from(first, SLICE);
            records.extend(slice.map(|(place, record)| (place, *record)));
        } else {
            break;
        }
        first += SLICE as Place;
        thread::sleep(PAUSE);
    }
    records.sort_unstable_by_key(|(_, record)| record.identity.generation);
    records
}
