// SPDX-License-Identifier: Apache-2.0
//! A panic of the native core says whose it is. On a thread of the interpreter it becomes a `PanicException`, which is no `Exception`:
//! what catches those does not see it, and the process may end without another word.

use std::sync::Once;

pub fn announce() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            eprintln!(
                "banyan: a fault in the native core, on thread {:?}: {info}. Please report it. What needed this fails; where it was asked \
                 for by SGLang's scheduler, the rank ends (pyo3_runtime.PanicException)",
                thread.name().unwrap_or("of the interpreter")
            );
            before(info);
        }));
    });
}
