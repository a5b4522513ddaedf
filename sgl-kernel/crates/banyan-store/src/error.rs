// SPDX-License-Identifier: Apache-2.0
//! What can go wrong at the edge, each with what was attempted and the way out.

use std::fmt;
use std::io;
use std::path::Path;

#[derive(Debug)]
pub enum StoreError {
    /// The caller's arguments, or a directory, cannot be right.
    Invalid(String),
    /// The system refused, with what was attempted.
    System { doing: String, cause: io::Error },
}

pub type Result<T> = std::result::Result<T, StoreError>;

impl StoreError {
    pub fn os(doing: impl Into<String>, cause: io::Error) -> Self {
        Self::System {
            doing: doing.into(),
            cause,
        }
    }

    /// Whether it is of the moment.
    pub fn passes(&self) -> bool {
        matches!(self, Self::System { cause, .. } if passes(cause))
    }

    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::System { cause, .. } if is_no_space(cause))
    }

    pub fn is_denied(&self) -> bool {
        matches!(self, Self::System { cause, .. } if cause.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// Whether an error is of the moment: it says nothing about what was to be read.
pub fn passes(error: &io::Error) -> bool {
    let is_of_process = matches!(
        error.raw_os_error(),
        Some(
            libc::EMFILE
                | libc::ENFILE
                | libc::ENOMEM
                | libc::ENOBUFS
                | libc::EAGAIN
                | libc::EINTR
                | libc::ETIMEDOUT
        )
    );
    is_of_process || is_of_mount(error)
}

/// Whether an error is the mount's: what serves it is away or has started again, credentials have run out, or it is only read any more.
/// A file that was open before may answer so for good, and one that is opened anew not.
pub fn is_of_mount(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ENOTCONN
                | libc::ECONNABORTED
                | libc::ESTALE
                | libc::ENODEV
                | libc::EHOSTDOWN
                | libc::EACCES
                | libc::EROFS
        )
    )
}

pub fn is_no_space(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// Names what was attempted on which path.
pub trait Doing<T> {
    fn doing(self, verb: &str, path: &Path) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, verb: &str, path: &Path) -> Result<T> {
        self.map_err(|cause| StoreError::os(format!("cannot {verb} {}", path.display()), cause))
    }
}

/// `Err(Invalid)` with a formatted reason.
macro_rules! invalid {
    ($($reason:tt)*) => { Err($crate::error::StoreError::Invalid(format!($($reason)*))) };
}
pub(crate) use invalid;

impl fmt::Display for StoreError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(reason) => out.write_str(reason),
            Self::System { doing, cause } => write!(out, "{doing}: {cause}"),
        }
    }
}

impl std::error::Error for StoreError {}
