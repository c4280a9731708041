//! The thread `life`: heartbeats, signals, and the eye on the parent.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use turnhost_protocol::signal::{is_ignored, unblock};

use super::ending::{Cause, Ending};
use super::heartbeat::Pulse;

/// How often the parent is looked at: SPEC §8.
const PARENT_INTERVAL: Duration = Duration::from_secs(1);

/// The signal that the kernel sends when the parent ends. One that nothing else sends, so that a
/// passing thread of a living parent is not taken for its death.
const PARENT_DEATH: i32 = SIGUSR1;

/// Each signal writes a byte into its pipe; the handler does nothing else.
pub struct Life {
    end: UnixStream,
    parent_death: UnixStream,
    parent: Parent,
}

/// The process that started this one.
pub struct Parent {
    ppid: i32,
}

impl Parent {
    /// Remembers the parent. With `expected`, its pid as it knows it, the kernel is asked to tell
    /// of its death; a parent that died before that shows as another ppid at the next look.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn watch(expected: Option<i32>) -> io::Result<Self> {
        let Some(ppid) = expected else {
            return Ok(Self {
                ppid: current_ppid(),
            });
        };
        set_parent_process_death_signal(Some(Signal::USR1))?;
        Ok(Self { ppid })
    }

    /// The ppid now, if it is another one.
    fn replaced_by(&self) -> Option<i32> {
        Some(current_ppid()).filter(|ppid| *ppid != self.ppid)
    }
}

fn current_ppid() -> i32 {
    getppid().map_or(0, Pid::as_raw_pid)
}

impl Life {
    /// Takes the signals over. Call it before other threads or children are started.
    ///
    /// # Errors
    /// A pipe or a handler cannot be made.
    pub fn prepare(parent: impl FnOnce() -> io::Result<Parent>) -> io::Result<Self> {
        let pipe = |signals: &[i32]| -> io::Result<UnixStream> {
            let (receiver, sender) = UnixStream::pair()?;
            receiver.set_nonblocking(true)?;
            for signal in signals {
                signal_hook::low_level::pipe::register(*signal, sender.try_clone()?)?;
            }
            Ok(receiver)
        };
        unblock(&[SIGTERM, SIGINT, SIGHUP, PARENT_DEATH])?;
        let mut ends = vec![SIGTERM, SIGINT];
        // Whoever starts a host with `nohup` means it.
        ends.extend(Some(SIGHUP).filter(|signal| !is_ignored(*signal)));
        let end = pipe(&ends)?;
        let parent_death = pipe(&[PARENT_DEATH])?;
        Ok(Self {
            end,
            parent_death,
            parent: parent()?,
        })
    }

    /// Starts the thread. It lives as long as the process.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        self,
        heartbeat: Option<Duration>,
        pulse: Pulse,
        ending: Ending,
    ) -> io::Result<()> {
        thread::Builder::new()
            .name("life".into())
            .spawn(move || self.run(heartbeat, &pulse, &ending))?;
        Ok(())
    }

    fn run(self, heartbeat: Option<Duration>, pulse: &Pulse, ending: &Ending) {
        let began = Instant::now();
        let mut next_beat = heartbeat.map(|interval| began + interval);
        let mut next_look = Some(began);
        loop {
            let now = Instant::now();
            if let (Some(at), Some(interval)) = (next_beat, heartbeat)
                && now >= at
            {
                pulse.beat();
                // Beats that were missed while the process was stopped are not made up for.
                let missed = now.duration_since(at).as_nanos() / interval.as_nanos().max(1);
                let missed = u32::try_from(missed).unwrap_or(u32::MAX);
                next_beat = Some(at + interval * missed.saturating_add(1));
            }
            if next_look.is_some_and(|at| now >= at) {
                // Once it is gone there is nothing more to look at.
                next_look = (!self.look_at_parent(ending)).then(|| now + PARENT_INTERVAL);
            }
            let next = [next_beat, next_look].into_iter().flatten().min();
            self.wait(next, ending, &mut next_look);
        }
    }

    /// Waits for a signal, at most until `next`, and handles it.
    fn wait(&self, next: Option<Instant>, ending: &Ending, next_look: &mut Option<Instant>) {
        let timeout = next.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let mut fds = [
            PollFd::from_borrowed_fd(self.end.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.parent_death.as_fd(), PollFlags::IN),
        ];
        // An interruption is seen as nothing to read.
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return;
        }
        if drain_pipe(&self.end) {
            ending.begin(Cause::Signal);
        }
        if drain_pipe(&self.parent_death) && next_look.is_some() && self.look_at_parent(ending) {
            *next_look = None;
        }
    }

    /// Begins the end if the parent is gone; answers whether it is.
    fn look_at_parent(&self, ending: &Ending) -> bool {
        let Some(ppid) = self.parent.replaced_by() else {
            return false;
        };
        ending.begin(Cause::Orphan {
            old_ppid: self.parent.ppid,
            ppid,
        });
        true
    }
}

/// Reads what signals wrote; answers whether there was something.
fn drain_pipe(pipe: &UnixStream) -> bool {
    let mut seen = false;
    let mut bytes = [0_u8; 64];
    while matches!(rustix::io::read(pipe, &mut bytes), Ok(count) if count > 0) {
        seen = true;
    }
    seen
}
