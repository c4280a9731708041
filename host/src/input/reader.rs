//! The reader thread: lines in, one at a time, until the end of input.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use turnhost_protocol::line::{Line, LineReader};

use super::Dispatcher;

/// Reads and dispatches until the end of input; answers why it ended, for the log.
pub fn read(stdin: OwnedFd, max_frame_bytes: usize, dispatcher: &Dispatcher) -> String {
    let mut lines = LineReader::new(Source(stdin), max_frame_bytes);
    loop {
        if !lines.has_buffered_line() {
            // Nothing to do but to wait: let out what was answered so far.
            dispatcher.output().flush();
        }
        while dispatcher.output().is_full() {
            dispatcher.output().wait_for_room(LOOK_INTERVAL);
            if lines.source().is_hung_up() {
                return "stdin was closed by a parent that reads nothing".to_owned();
            }
        }
        match lines.next_line() {
            Ok(Some(Line::Whole(line) | Line::Cut(line))) => dispatcher.line(line),
            Ok(Some(Line::TooLong { head, bytes })) => dispatcher.too_long(head, bytes),
            Ok(None) => {
                dispatcher.output().flush();
                return "end of input".to_owned();
            }
            // A failed read is as final as the end: trying again could go on for ever.
            Err(error) => return format!("reading stdin failed: {error}"),
        }
    }
}

/// How often a reader that is held back looks whether the parent is still there.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Stdin, read without the buffer of the standard library.
struct Source(OwnedFd);

impl Source {
    /// Whether the other end was closed, though input may still wait to be read.
    fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::empty())];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::HUP)
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.0, &mut *into) {
                // A parent that shares the description may have made it non-blocking.
                Err(Errno::AGAIN) => {
                    let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
                    // An interruption or an error shows at the next read.
                    let _ = poll(&mut fds, None);
                }
                other => return Ok(other?),
            }
        }
    }
}
