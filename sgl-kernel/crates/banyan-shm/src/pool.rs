// SPDX-License-Identifier: Apache-2.0
//! A rank's pool, as its frame table announces it to the others.
//!
//! Invariants
//! * A described pool is never mapped nor copied here: its bytes belong to a device, and who can open them copies them.
//! * A copy here is between mapped pools; one with a described pool at either end is refused.

use std::fs;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::error::{Result, ShmError, invalid};
use crate::memory::{Access, Mapping, SharedMemory, map_foreign, map_foreign_pool};

/// More than any description needs. The words that say which kind a pool is can be written by all: a pool is not to be
/// taken for a description.
const MAX_DESCRIPTION_BYTES: usize = 1 << 20;

/// As a word of the frame table's header. Zero is the kind of frame tables that were written before there was a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum PoolKind {
    Mapped = 0,
    Described = 1,
}

impl PoolKind {
    pub fn of_word(word: u64) -> Option<Self> {
        match word {
            0 => Some(Self::Mapped),
            1 => Some(Self::Described),
            _ => None,
        }
    }
}

/// The own pool.
#[derive(Clone)]
pub enum Pool {
    /// Peers map it and copy out of it.
    Mapped(Arc<SharedMemory>),
    /// `num_bytes` that no process can map by a descriptor; `description` tells a peer how to open them, and is opaque
    /// here.
    Described {
        description: Arc<SharedMemory>,
        num_bytes: u64,
    },
}

impl Pool {
    pub fn described(description: &[u8], num_bytes: u64) -> Result<Self> {
        let memory = SharedMemory::create(description.len(), "pool-description")?;
        // SAFETY: both are `description.len()` bytes long, do not overlap, and nobody else knows the new memory yet.
        unsafe {
            std::ptr::copy_nonoverlapping(
                description.as_ptr(),
                memory.mapping().start(),
                description.len(),
            );
        }
        Ok(Self::Described {
            description: Arc::new(memory),
            num_bytes,
        })
    }

    pub fn kind(&self) -> PoolKind {
        match self {
            Self::Mapped(_) => PoolKind::Mapped,
            Self::Described { .. } => PoolKind::Described,
        }
    }

    /// How the process that has this pool maps those of its peers. It only reads them; but a rank whose own pool is a
    /// device's has to register them with a driver, and most GPUs cannot register what is mapped for reading only.
    pub fn access_to_peers(&self) -> Access {
        match self {
            Self::Mapped(_) => Access::ReadOnly,
            Self::Described { .. } => Access::ReadWrite,
        }
    }

    /// What peers open: the pool itself, or its description.
    pub fn fd(&self) -> RawFd {
        match self {
            Self::Mapped(memory) => memory.fd(),
            Self::Described { description, .. } => description.fd(),
        }
    }

    pub fn num_bytes(&self) -> u64 {
        match self {
            Self::Mapped(memory) => memory.len() as u64,
            Self::Described { num_bytes, .. } => *num_bytes,
        }
    }

    /// The bytes to copy into, of a pool that can be mapped.
    pub fn memory(&self) -> Result<&Arc<SharedMemory>> {
        match self {
            Self::Mapped(memory) => Ok(memory),
            Self::Described { .. } => {
                invalid!("pages of a described pool are copied by whoever can open it")
            }
        }
    }
}

/// Device and inode: the same memory, however often it is announced. No other has it while it is mapped.
pub type FileIdentity = (u64, u64);

/// A peer's pool, as far as this process can see it.
pub enum PeerPool {
    Mapped(Mapping, FileIdentity),
    Described(Vec<u8>),
}

impl PeerPool {
    /// `None` for a mapped file whose size is not `num_bytes`.
    pub fn open(
        file: &fs::File,
        kind: PoolKind,
        num_bytes: u64,
        access: Access,
    ) -> Result<Option<Self>> {
        match kind {
            PoolKind::Mapped => {
                let pool = map_foreign_pool(file, access, "a peer's pool")?;
                let found = file
                    .metadata()
                    .map_err(|cause| ShmError::os("cannot identify a peer's pool", cause))?;
                let identity = (found.dev(), found.ino());
                Ok((pool.len() as u64 == num_bytes).then_some(Self::Mapped(pool, identity)))
            }
            PoolKind::Described => {
                let mapping = map_foreign(file, Access::ReadOnly, "a description of a pool")?;
                if mapping.len() > MAX_DESCRIPTION_BYTES {
                    return invalid!("a description of a pool has {} bytes", mapping.len());
                }
                let mut description = vec![0; mapping.len()];
                // SAFETY: `mapping` is readable for its length, the vector as long, and the owner wrote it before the
                // announcement.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        mapping.start().cast_const(),
                        description.as_mut_ptr(),
                        mapping.len(),
                    );
                }
                Ok(Some(Self::Described(description)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kind_when_its_word_is_unknown_then_none() {
        for kind in [PoolKind::Mapped, PoolKind::Described] {
            assert_eq!(PoolKind::of_word(kind as u64), Some(kind));
        }
        assert_eq!(PoolKind::of_word(2), None);
    }

    #[test]
    fn described_when_it_is_as_large_as_a_pool_then_refused() {
        let pool = SharedMemory::create(MAX_DESCRIPTION_BYTES + 1, "pool").unwrap();
        let file = fs::File::open(format!("/proc/self/fd/{}", pool.fd())).unwrap();
        let refused = PeerPool::open(&file, PoolKind::Described, 1 << 40, Access::ReadOnly);
        assert!(refused.is_err_and(|error| error.to_string().contains("1048577 bytes")));
    }

    #[test]
    fn described_when_opened_then_the_bytes_come_back_and_nothing_is_copied() {
        let pool = Pool::described(b"how to open it", 1 << 40).unwrap();
        assert_eq!(pool.num_bytes(), 1 << 40);
        assert!(pool.memory().is_err());
        let file = fs::File::open(format!("/proc/self/fd/{}", pool.fd())).unwrap();
        let seen = PeerPool::open(&file, pool.kind(), pool.num_bytes(), Access::ReadOnly).unwrap();
        assert!(
            matches!(seen, Some(PeerPool::Described(bytes)) if bytes == b"how to open it".to_vec())
        );
    }
}
