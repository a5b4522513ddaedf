// SPDX-License-Identifier: Apache-2.0
//! Owners of threads are let go without the interpreter's lock: what such a thread waits for may need it to come to an end.

use std::mem::ManuallyDrop;
use std::ops::Deref;

use pyo3::prelude::*;

pub struct Unlocked<T: Send>(ManuallyDrop<T>);

impl<T: Send> Unlocked<T> {
    pub fn new(owner: T) -> Self {
        Self(ManuallyDrop::new(owner))
    }
}

impl<T: Send> Deref for Unlocked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Unlocked<T> {
    fn drop(&mut self) {
        // SAFETY: taken here once, and nobody looks at it after its end.
        let owner = unsafe { ManuallyDrop::take(&mut self.0) };
        Python::attach(|py| py.detach(|| drop(owner)));
    }
}
