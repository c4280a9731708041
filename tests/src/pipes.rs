//! The threads at the three pipes of a host, and what they share with the test.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionbio;

use crate::frame::{Frame, Order};

/// Bytes of a line that a report shows.
const SHOWN_BYTES: usize = 400;

/// Lines that a report shows.
const SHOWN_LINES: usize = 300;

/// How often a thread that cannot write looks whether it still should.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// What is done with the lines of a host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Check {
    pub(crate) max_frame_bytes: usize,
    pub(crate) forgets_deltas: bool,
}

/// What came through the pipes so far.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) frames: Vec<Arc<Frame>>,
    order: Order,
    pub(crate) faults: Vec<String>,
    pub(crate) transcript: VecDeque<String>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) bytes_sent: u64,
    pub(crate) hung_up: bool,
    pub(crate) reading_stopped: bool,
    pub(crate) closing_output: bool,
    pub(crate) output_ended: bool,
    /// Whether reading was ever stopped: a host that ends while its pipe is full cannot finish the
    /// line that it was writing.
    pub(crate) may_tear: bool,
    pub(crate) log_ended: bool,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no thread of the harness panics while it holds the state")
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits for changes until `not_yet` no longer holds.
    ///
    /// # Panics
    /// It still holds at `deadline`.
    pub(crate) fn wait_while(
        &self,
        deadline: Instant,
        what: &str,
        not_yet: impl Fn(&State) -> bool,
    ) {
        let left = deadline.saturating_duration_since(Instant::now());
        let (state, wait) = self
            .changed
            .wait_timeout_while(self.lock(), left, |state| not_yet(state))
            .expect("no thread of the harness panics while it holds the state");
        // The report of a failed test takes the lock too.
        drop(state);
        assert!(!wait.timed_out(), "waited in vain for {what}");
    }
}

impl State {
    pub(crate) fn note(&mut self, arrow: &str, line: &[u8]) {
        if self.transcript.len() == SHOWN_LINES {
            self.transcript.pop_front();
        }
        let shown = &line[..line.len().min(SHOWN_BYTES)];
        let mut entry = format!("{arrow} {}", String::from_utf8_lossy(shown).trim_end());
        if shown.len() < line.len() {
            let _ = write!(entry, " … ({} bytes)", line.len());
        }
        self.transcript.push_back(entry);
    }

    fn take(&mut self, mut line: Vec<u8>, check: Check) -> Result<(), String> {
        if line.pop_if(|last| *last == b'\n').is_none() {
            return if self.may_tear {
                Ok(())
            } else {
                Err("a line ends".into())
            };
        }
        if line.len() > check.max_frame_bytes {
            return Err(format!(
                "a line has at most {} bytes",
                check.max_frame_bytes
            ));
        }
        let line = String::from_utf8(line).map_err(|_| "a line is UTF-8")?;
        let frame = Frame::parse(line)?;
        let order = self.order.check(&frame);
        if !(check.forgets_deltas && frame.event() == Some("message.delta")) {
            self.frames.push(Arc::new(frame));
        }
        order
    }
}

/// Starts the threads at the pipes of `child`, which has all three. What is sent goes to its stdin;
/// dropping the sender closes that.
pub(crate) fn start(
    child: &mut Child,
    check: Check,
) -> (Arc<Shared>, Sender<Vec<u8>>, Vec<JoinHandle<()>>) {
    let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
        unreachable!("all three are piped");
    };
    let shared = Arc::new(Shared::default());
    let (input, lines) = mpsc::channel();
    let threads = vec![
        start_thread("host stdin", &shared, move |shared| {
            write_input(shared, stdin, &lines);
        }),
        start_thread("host stdout", &shared, move |shared| {
            read_output(shared, stdout, check);
        }),
        start_thread("host stderr", &shared, |shared| read_log(shared, stderr)),
    ];
    (shared, input, threads)
}

fn start_thread(
    name: &str,
    shared: &Arc<Shared>,
    run: impl FnOnce(&Shared) + Send + 'static,
) -> JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || run(&shared))
        .expect("a thread can be started")
}

fn write_input(shared: &Shared, mut stdin: ChildStdin, lines: &Receiver<Vec<u8>>) {
    // Only this end: the host's has a description of its own.
    ioctl_fionbio(&stdin, true).expect("a pipe can be made non-blocking");
    for bytes in lines {
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            if shared.lock().hung_up {
                return;
            }
            match stdin.write(rest) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut fds = [PollFd::new(&stdin, PollFlags::OUT)];
                    // Whatever came of it shows at the next write.
                    let _ = poll(&mut fds, Some(&LOOK));
                }
                Ok(count) => {
                    rest = &rest[count..];
                    shared.change(|state| state.bytes_sent += count as u64);
                }
                // The host is gone; its exit says why.
                Err(_) => return,
            }
        }
    }
}

fn read_output(shared: &Shared, stdout: ChildStdout, check: Check) {
    let mut stdout = BufReader::with_capacity(64 * 1024, stdout);
    loop {
        let mut state = shared.lock();
        while state.reading_stopped {
            state = shared
                .changed
                .wait(state)
                .expect("no thread of the harness panics while it holds the state");
        }
        drop(state);
        let mut line = Vec::new();
        let count = stdout.read_until(b'\n', &mut line).unwrap_or_default();
        if count == 0 || shared.lock().closing_output {
            // Before anybody hears of it: then the host cannot write to it any more.
            drop(stdout);
            return shared.change(|state| state.output_ended = true);
        }
        shared.change(|state| {
            state.note("←", &line);
            if let Err(fault) = state.take(line, check) {
                let frame = state.transcript.back().cloned().unwrap_or_default();
                state.faults.push(format!("{fault}: {frame}"));
            }
        });
    }
}

fn read_log(shared: &Shared, mut stderr: impl Read) {
    let mut buffer = [0; 4096];
    loop {
        match stderr.read(&mut buffer) {
            Ok(0) | Err(_) => return shared.change(|state| state.log_ended = true),
            Ok(count) => shared.change(|state| state.stderr.extend_from_slice(&buffer[..count])),
        }
    }
}
