// SPDX-License-Identifier: Apache-2.0
//! What the native core says goes to stderr, or nowhere: a log on a full disk, or one that nobody reads any more, is no fault. (`eprintln!`
//! panics there, and a panic within the hook of a panic ends the process.)
//!
//! A panic of the native core says whose it is. On a thread of the interpreter it becomes a `PanicException`, which is no `Exception`:
//! what catches those does not see it, and the process may end without another word.

use std::sync::Once;

/// As `eprintln!`, where it can be written.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

/// From now on; `say` gets the line. Only the first call counts.
pub fn announce(say: impl Fn(String) + Send + Sync + 'static) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("of the interpreter");
            let words = info.to_string().replace('\n', " ");
            say(format!(
                "banyan: a fault in the native core, thread {name}: {words}. What needed this fails; on SGLang's scheduler the rank ends \
                 (pyo3_runtime.PanicException)"
            ));
            before(info);
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn thread_when_it_panics_then_one_line_says_which_and_why() {
        let said: Arc<Mutex<Vec<String>>> = Arc::default();
        let lines = said.clone();
        announce(move |line| lines.lock().unwrap().push(line));
        let thread = std::thread::Builder::new().name("the-unlucky".into());
        let work = || panic!("a fault\non purpose");
        assert!(thread.spawn(work).unwrap().join().is_err());
        let said = said.lock().unwrap();
        let line = said.iter().find(|line| line.contains("the-unlucky"));
        let line = line.expect("nobody said it");
        assert!(line.contains("banyan:") && line.contains("a fault on purpose"));
        assert_eq!(line.lines().count(), 1);
    }
}
