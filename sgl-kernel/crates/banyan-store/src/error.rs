// SPDX-License-Identifier: Apache-2.0
//! What can go wrong at the edge, each with what was attempted and the way out.

use std::io;
use std::path::Path;

pub use banyan_shm::error::{Result, ShmError as StoreError};

/// Whether an error is of the moment: it says nothing about what was to be read.
pub fn passes(error: &io::Error) -> bool {
    is_of_process(error) || is_of_mount(error)
}

/// Whether it is not even the mount's.
pub fn is_of_process(error: &io::Error) -> bool {
    matches!(
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
    )
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

/// Whether what was attempted found no space.
pub fn found_no_space(error: &StoreError) -> bool {
    error.system_cause().is_some_and(is_no_space)
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
