//! What a parent did to the signals of a program that it started.

use std::io;

/// Lets `signals` through to the calling thread and those that it starts, which a parent may have
/// blocked: a mask is inherited.
///
/// # Errors
/// One of them is no signal.
pub fn unblock(signals: &[i32]) -> io::Result<()> {
    // SAFETY: the set lives on this stack and is initialised by `sigemptyset` before it is used;
    // no wrapper in use here offers the mask of a thread.
    let failed = unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in signals {
            libc::sigaddset(&mut set, *signal);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut())
    };
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(failed))
    }
}

/// Whether the parent had `signal` ignored, as `nohup` has SIGHUP. Ask before a handler is set.
#[must_use]
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: the call only fills in the old action, which lives on this stack.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_unblocked_and_ignored_ones_are_seen() {
        // The standard library ignores this one in each program, and no other.
        assert!(is_ignored(libc::SIGPIPE) && !is_ignored(libc::SIGHUP));
        unblock(&[libc::SIGHUP]).unwrap();
    }
}
