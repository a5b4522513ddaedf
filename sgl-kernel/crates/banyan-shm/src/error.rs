// SPDX-License-Identifier: Apache-2.0
//! What can go wrong at the edge, each with the numbers that say why.

use std::fmt;
use std::io;

use crate::ledger::Refusal;

#[derive(Debug)]
pub enum ShmError {
    /// The caller's arguments cannot be right (`ValueError`).
    Invalid(String),
    /// The system refused (`OSError`), with what was attempted.
    System { doing: String, cause: io::Error },
}

pub type Result<T> = std::result::Result<T, ShmError>;

impl ShmError {
    pub fn last_os(doing: impl Into<String>) -> Self {
        Self::os(doing, io::Error::last_os_error())
    }

    /// Whether it may be otherwise a moment later, whoever asks: descriptors or memory have run out.
    pub fn may_pass(&self) -> bool {
        matches!(
            self.system_cause().and_then(io::Error::raw_os_error),
            Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)
        )
    }

    /// What the system said.
    pub fn system_cause(&self) -> Option<&io::Error> {
        match self {
            Self::Invalid(_) => None,
            Self::System { cause, .. } => Some(cause),
        }
    }

    pub fn os(doing: impl Into<String>, cause: io::Error) -> Self {
        Self::System {
            doing: doing.into(),
            cause,
        }
    }
}

/// `Err(Invalid)` with a formatted reason.
macro_rules! invalid {
    ($($reason:tt)*) => { Err($crate::error::ShmError::Invalid(format!($($reason)*))) };
}
pub(crate) use invalid;

impl fmt::Display for ShmError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(reason) => out.write_str(reason),
            Self::System { doing, cause } => write!(out, "{doing}: {cause}"),
        }
    }
}

impl std::error::Error for ShmError {}

impl From<Refusal> for ShmError {
    fn from(refusal: Refusal) -> Self {
        Self::Invalid(match refusal {
            Refusal::OutOfRange { frame, num_frames } => {
                format!("frame {frame} is outside the frame table of {num_frames} frames")
            }
            Refusal::Repeated { frame } => format!("frame {frame} is named twice in one call"),
            Refusal::Quarantined { frame } => {
                format!("frame {frame} is in quarantine: a peer may still be reading it")
            }
            Refusal::PublishedAsOther { frame } => {
                format!("frame {frame} is already published under another key; retire it first")
            }
            Refusal::Lengths {
                num_frames,
                num_keys,
            } => format!("{num_frames} frames but {num_keys} keys"),
        })
    }
}
