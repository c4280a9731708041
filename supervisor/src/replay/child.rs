//! A host as a child process: three pipes and an exit, each wait with a deadline.
//!
//! One `poll` serves all of it, so there is no thread that could be stuck on a pipe which a
//! grandchild holds open. Nothing here knows what a frame is.
//!
//! Invariant: stdout and stderr are read during every wait, so a host that is being written to can
//! always write.
//! Invariant: when a [`HostProcess`] has ended or is dropped, its process group is gone and the
//! child is reaped.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, pidfd_open,
    pidfd_send_signal, set_child_subreaper, waitid, waitpgid,
};
use turnhost_protocol::limits::{MAX_FRAME_BYTES, MAX_QUOTED_BYTES};

use super::fixture::Exit;
use super::lines::Lines;

/// Bytes taken from a pipe at once.
const READ_BYTES: usize = 64 * 1024;

/// How much of stderr is kept for a report, in bytes.
const STDERR_TAIL_BYTES: usize = 8 * 1024;

/// Variables of the player that its hosts get; everything else comes from the fixture.
const PASSED_ENVIRONMENT: [&str; 6] =
    ["PATH", "LANG", "TZ", "TMPDIR", "RUST_BACKTRACE", "RUST_LOG"];

/// Runs its arguments and waits for them: a parent that can die alone.
const MORTAL_PARENT: &str = r#""$@"; exit "$?""#;

/// What a wait for a line has brought.
#[derive(Debug)]
pub(super) enum Next {
    /// A line without its line feed.
    Line(Vec<u8>),
    /// The host has ended so, and everything that it wrote was read.
    Ended(Exit),
    /// The deadline has passed.
    Late,
}

/// How a host is started.
pub(super) struct Launch<'a> {
    pub(super) program: &'a OsStr,
    pub(super) args: Vec<OsString>,
    pub(super) env: &'a BTreeMap<String, String>,
    /// Put a parent between the player and the host that can die alone.
    pub(super) mortal_parent: bool,
}

/// A running host, or one that has ended.
pub(super) struct HostProcess {
    child: Child,
    /// The child; once its mortal parent is dead, the host.
    process: OwnedFd,
    /// The host behind its mortal parent, once it is known.
    adopted: Option<OwnedFd>,
    stdin: Option<ChildStdin>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    unwritten: VecDeque<u8>,
    unread: Lines,
    stderr_tail: VecDeque<u8>,
    exit: Option<Exit>,
}

impl HostProcess {
    /// Starts a host in a process group of its own.
    pub(super) fn start(launch: Launch<'_>) -> io::Result<Self> {
        let mut command = if launch.mortal_parent {
            // An orphan goes to the nearest subreaper, which then can wait for it.
            set_child_subreaper(Some(rustix::process::getpid()))?;
            let mut command = Command::new("/bin/sh");
            command
                .args(["-c", MORTAL_PARENT, "sh"])
                .arg(launch.program);
            command
        } else {
            Command::new(launch.program)
        };
        command.args(launch.args).env_clear().process_group(0);
        for name in PASSED_ENVIRONMENT {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.envs(launch.env);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let process = match pidfd_open(pid_of(&child), PidfdFlags::empty()) {
            Ok(process) => process,
            Err(error) => {
                // Nothing else knows of the child yet.
                child.kill()?;
                child.wait()?;
                return Err(error.into());
            }
        };
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().map(OwnedFd::from);
        let stderr = child.stderr.take().map(OwnedFd::from);
        let host = Self {
            child,
            process,
            adopted: None,
            stdin,
            stdout,
            stderr,
            unwritten: VecDeque::new(),
            unread: Lines::default(),
            stderr_tail: VecDeque::new(),
            exit: None,
        };
        for pipe in [host.stdout.as_ref(), host.stderr.as_ref()]
            .into_iter()
            .flatten()
        {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        if let Some(stdin) = &host.stdin {
            rustix::io::ioctl_fionbio(stdin, true)?;
        }
        Ok(host)
    }

    /// Writes `bytes` to the host's input; answers whether it took them before the deadline.
    ///
    /// # Errors
    /// The pipe is closed on either side.
    pub(super) fn write(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<bool> {
        self.unwritten.extend(bytes);
        while !self.unwritten.is_empty() {
            if self.stdin.is_none() {
                return Err(ErrorKind::BrokenPipe.into());
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            self.pump(deadline)?;
        }
        Ok(true)
    }

    /// The next line that the host has written.
    ///
    /// # Errors
    /// A pipe fails, or the host writes something that is no line.
    pub(super) fn next_line(&mut self, deadline: Instant) -> io::Result<Next> {
        loop {
            if let Some(line) = self.unread.next_line() {
                return Ok(Next::Line(line));
            }
            let rest = self.unread.rest();
            if rest.len() > MAX_FRAME_BYTES {
                return Err(io::Error::other(format!(
                    "it writes a line of more than {MAX_FRAME_BYTES} bytes"
                )));
            }
            if let Some(exit) = self.exit {
                if rest.is_empty() {
                    return Ok(Next::Ended(exit));
                }
                let rest = String::from_utf8_lossy(&rest[..rest.len().min(MAX_QUOTED_BYTES)]);
                return Err(io::Error::other(format!(
                    "it ended in the middle of a line: {rest}"
                )));
            }
            if Instant::now() >= deadline {
                return Ok(Next::Late);
            }
            self.pump(deadline)?;
        }
    }

    /// Closes the host's input.
    pub(super) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Names the host behind a mortal parent, so that signals reach it.
    ///
    /// # Errors
    /// The process `pid` is not a child of the mortal parent.
    pub(super) fn adopt(&mut self, pid: u64) -> io::Result<()> {
        if self.adopted.is_some() {
            return Ok(());
        }
        let host = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let host = host.ok_or_else(|| io::Error::other(format!("{pid} is no process id")))?;
        let pidfd = pidfd_open(host, PidfdFlags::empty())?;
        // Looked at with the descriptor open, so that it is this process that is meant.
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        if parent.map(str::trim) != Some(self.child.id().to_string().as_str()) {
            return Err(io::Error::other(format!(
                "process {pid}, which the hello names, was not started by this player"
            )));
        }
        self.adopted = Some(pidfd);
        Ok(())
    }

    /// Sends `signal` to the host.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        let process = self.adopted.as_ref().unwrap_or(&self.process);
        Ok(pidfd_send_signal(process, signal)?)
    }

    /// Ends the parent of the host, which [`Self::adopt`] has named.
    pub(super) fn kill_parent(&mut self) -> io::Result<()> {
        let host = self
            .adopted
            .take()
            .ok_or_else(|| io::Error::other("the host is not known"))?;
        self.child.kill()?;
        self.child.wait()?;
        self.process = host;
        Ok(())
    }

    /// The last of what the host wrote to stderr.
    pub(super) fn stderr_tail(&mut self) -> String {
        self.read_stderr();
        String::from_utf8_lossy(self.stderr_tail.make_contiguous()).into_owned()
    }

    /// Waits until something happens or the deadline passes, and deals with what has happened.
    fn pump(&mut self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut watched = vec![PollFd::new(&self.process, PollFlags::IN)];
        let input = self.stdin.as_ref().filter(|_| !self.unwritten.is_empty());
        watched.extend(input.map(|pipe| PollFd::new(pipe, PollFlags::OUT)));
        let outputs = [self.stdout.as_ref(), self.stderr.as_ref()];
        watched.extend(
            outputs
                .into_iter()
                .flatten()
                .map(|pipe| PollFd::new(pipe, PollFlags::IN)),
        );
        match poll(&mut watched, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // What the host wrote before it ended is in the pipe when its end is seen.
        let ended = !watched[0].revents().is_empty();
        drop(watched);
        self.write_some()?;
        self.read_stdout()?;
        self.read_stderr();
        if ended {
            self.exit = Some(self.reap()?);
        }
        Ok(())
    }

    fn write_some(&mut self) -> io::Result<()> {
        while !self.unwritten.is_empty()
            && let Some(stdin) = &mut self.stdin
        {
            match stdin.write(self.unwritten.as_slices().0) {
                Ok(written) => drop(self.unwritten.drain(..written)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads until the pipe is empty: its end may be far, as a grandchild can hold it.
    fn read_stdout(&mut self) -> io::Result<()> {
        let unread = &mut self.unread;
        read_available(&mut self.stdout, |bytes| unread.push(bytes))
    }

    fn read_stderr(&mut self) {
        let tail = &mut self.stderr_tail;
        let read = read_available(&mut self.stderr, |bytes| {
            tail.extend(bytes);
            tail.drain(..tail.len().saturating_sub(STDERR_TAIL_BYTES));
        });
        if read.is_err() {
            // A log that cannot be read is no reason to stop the play.
            self.stderr = None;
        }
    }

    /// How the host, which has ended, did so; then ends what is left of its group.
    fn reap(&mut self) -> io::Result<Exit> {
        // Seen without reaping: while the dead host is there, nobody else can get its group's id.
        let seen = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(self.process.as_fd()), seen)?;
        let exit = status.and_then(|status| {
            let code = status.exit_status().map(Exit::Code);
            code.or_else(|| status.terminating_signal().map(Exit::Signal))
        });
        self.end_group();
        exit.ok_or_else(|| io::Error::other("the system does not tell how the host has ended"))
    }

    /// Ends the process group and reaps those of it that are children of the player.
    fn end_group(&mut self) {
        let group = pid_of(&self.child);
        // An error means that nobody is left.
        let _ = kill_process_group(group, Signal::KILL);
        while let Ok(Some(_)) = waitpgid(group, WaitOptions::empty()) {}
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        if self.exit.is_none() {
            self.end_group();
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Hands on what `pipe` holds now, and drops the pipe at its end.
fn read_available(pipe: &mut Option<OwnedFd>, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    while let Some(open) = pipe {
        match rustix::io::read(&*open, &mut buffer) {
            Ok(0) => *pipe = None,
            Ok(read) => take(&buffer[..read]),
            Err(rustix::io::Errno::AGAIN) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NOBODY: BTreeMap<String, String> = BTreeMap::new();

    fn shell(script: &str) -> HostProcess {
        let args = vec!["-c".into(), script.into()];
        let launch = Launch {
            program: OsStr::new("/bin/sh"),
            args,
            env: &NOBODY,
            mortal_parent: false,
        };
        HostProcess::start(launch).unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn lines_are_relayed_both_ways_until_the_end() {
        let mut host = shell("cat; echo log >&2; printf 'x\n\n'; exit 3");
        assert!(host.write(b"hello\n", soon()).unwrap());
        let next = |host: &mut HostProcess| match host.next_line(soon()).unwrap() {
            Next::Line(line) => String::from_utf8(line).unwrap(),
            other => format!("{other:?}"),
        };
        assert_eq!(next(&mut host), "hello");
        host.close_stdin();
        assert_eq!(
            [next(&mut host), next(&mut host), next(&mut host)],
            ["x", "", "Ended(Code(3))"]
        );
        assert_eq!(host.stderr_tail(), "log\n");
        assert!(host.write(b"x", soon()).is_err());
    }

    #[test]
    fn a_host_that_does_not_read_is_late_and_one_that_writes_meanwhile_is_not() {
        let big = vec![b'x'; 4 << 20];
        let mut host = shell("sleep 60");
        assert!(
            !host
                .write(&big, Instant::now() + Duration::from_millis(50))
                .unwrap()
        );
        let mut host = shell("head -c 1000000 /dev/zero; cat > /dev/null");
        assert!(host.write(&big, soon()).unwrap());
    }

    #[test]
    fn a_grandchild_that_holds_the_pipe_does_not_hold_the_end() {
        let mut host = shell("sleep 60 & printf cut");
        let error = host.next_line(soon()).unwrap_err().to_string();
        assert_eq!(error, "it ended in the middle of a line: cut");
        assert_eq!(host.exit, Some(Exit::Code(0)));
    }

    #[test]
    fn a_killed_host_tells_the_signal() {
        let mut host = shell("sleep 60");
        host.signal(Signal::KILL).unwrap();
        assert!(matches!(
            host.next_line(soon()).unwrap(),
            Next::Ended(Exit::Signal(9))
        ));
    }

    #[test]
    fn a_parent_can_die_before_its_host() {
        let args = vec!["-c".into(), "echo $$; read x; echo $PPID; exit 5".into()];
        let launch = Launch {
            program: OsStr::new("/bin/sh"),
            args,
            env: &NOBODY,
            mortal_parent: true,
        };
        let mut host = HostProcess::start(launch).unwrap();
        let Next::Line(pid) = host.next_line(soon()).unwrap() else {
            panic!("the host's pid")
        };
        let pid: u64 = String::from_utf8(pid).unwrap().parse().unwrap();
        assert!(host.adopt(1).is_err());
        assert!(host.kill_parent().is_err());
        host.adopt(pid).unwrap();
        host.kill_parent().unwrap();
        assert!(host.write(b"\n", soon()).unwrap());
        assert!(matches!(host.next_line(soon()).unwrap(), Next::Line(_)));
        assert!(matches!(
            host.next_line(soon()).unwrap(),
            Next::Ended(Exit::Code(5))
        ));
    }

    #[test]
    fn nothing_is_left_of_a_dropped_host() {
        let mut host = shell("sleep 60 & echo $!; wait");
        let Next::Line(pid) = host.next_line(soon()).unwrap() else {
            panic!("a pid")
        };
        drop(host);
        let status = format!("/proc/{}/stat", String::from_utf8(pid).unwrap());
        // Killed; whoever inherited it may not have reaped it yet.
        let stat = std::fs::read_to_string(status).unwrap_or_default();
        assert!(
            stat.is_empty() || stat.contains(") Z ") || stat.contains(") X "),
            "{stat}"
        );
    }
}
