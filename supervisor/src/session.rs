//! What is left in the session of a process that ended.
//!
//! Invariant: the caller sees to it that the session's id cannot have been given out again: its
//! leader is alive, or a zombie that is not reaped yet. Each process is checked again through a
//! pidfd before it is signalled.

use std::fs;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use turnhost_protocol::process::Stat;

/// The live processes in the session `session`, its leader left out.
pub(crate) fn members(session: i32) -> Vec<i32> {
    all_pids()
        .filter(|pid| *pid != session && is_member(*pid, session))
        .collect()
}

/// Sends each of them `signal`; answers how many there were.
pub(crate) fn signal_members(session: i32, signal: Signal) -> usize {
    let members = members(session);
    for pid in &members {
        let Some(pid) = Pid::from_raw(*pid) else {
            continue;
        };
        // One that is gone needs no signal.
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else {
            continue;
        };
        if is_member(pid.as_raw_nonzero().get(), session) {
            // What cannot be signalled is counted again later.
            let _ = pidfd_send_signal(&pidfd, signal);
        }
    }
    members.len()
}

/// The pids of all processes that `/proc` shows.
pub(crate) fn all_pids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

fn is_member(pid: i32, session: i32) -> bool {
    matches!(Stat::of(pid), Ok(Some(stat)) if stat.session == session && !stat.is_zombie())
}
