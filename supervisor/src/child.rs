//! One host as a process: spawned, signalled, ended, reaped.
//!
//! Invariant: a process stays unreaped as long as its [`HostProcess`] is used, so that neither its
//! pid nor its session's id can be given to another one; signals go through its pidfd. Where another
//! part of the program reaps it all the same, its session is left alone.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal,
    waitid,
};
use turnhost_protocol::process::{Identity, Stat};

use crate::core;
use crate::session;

/// Size of the pipes from and to a host: fewer switches between the processes at full speed.
const PIPE_BYTES: usize = 256 * 1024;

/// The name of our own host, which alone knows its flags.
const OWN_HOST: &str = "turnhost";

/// The end of a host that another part of this program reaped: nobody knows its status any more.
const UNKNOWN_EXIT: core::Exit = core::Exit::Code(-1);

/// How long a host that nobody was told of may take to end by SIGKILL, in seconds.
const DESTROY_SECS: i64 = 1;

/// How often what such a host left is killed: what forks meanwhile is met by the next time.
const MOST_SWEEPS: usize = 100;

/// How a host is started.
#[derive(Debug, Clone)]
pub(crate) struct HostCommand {
    argv: Vec<OsString>,
    environment: BTreeMap<OsString, OsString>,
}

/// Why a host could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpawnError {
    #[error("cannot start the host {}: {source}; give its command line after --", program.display())]
    Spawn { program: PathBuf, source: io::Error },
    #[error("cannot watch the host with pid {pid}: {source}; it was killed")]
    Watch { pid: u32, source: io::Error },
}

impl HostCommand {
    /// `argv` with its environment. Our own host is told to end with this process; any other
    /// program is told of the home by the reference's name too.
    pub(crate) fn new(
        mut argv: Vec<OsString>,
        mut environment: BTreeMap<OsString, OsString>,
    ) -> Self {
        let program = argv.first().map(PathBuf::from).unwrap_or_default();
        if program.file_name() == Some(OsStr::new(OWN_HOST)) {
            let pid = std::process::id().to_string();
            argv.splice(1..1, ["--parent-death-signal".into(), pid.into()]);
        } else if let Some(home) = environment.get(OsStr::new("TURNHOST_HOME")).cloned() {
            environment.insert("HERMES_HOME".into(), home);
        }
        Self { argv, environment }
    }

    /// The command line, as it is registered.
    pub(crate) fn argv(&self) -> Vec<String> {
        let shown = self.argv.iter().map(|word| word.to_string_lossy());
        shown.map(|word| word.into_owned()).collect()
    }

    /// Starts the host in a session of its own, with three descriptors. The calling thread has
    /// to live as long as this process: its end is what the host takes for the supervisor's.
    pub(crate) fn spawn(&self) -> Result<HostProcess, SpawnError> {
        let program = self.argv.first().cloned().unwrap_or_default();
        let mut command = Command::new(&program);
        command
            .args(self.argv.iter().skip(1))
            .env_clear()
            .envs(&self.environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: only system calls that are safe between fork and exec; nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                close_others_on_exec()
            });
        }
        let spawned = command.spawn().map_err(|source| SpawnError::Spawn {
            program: PathBuf::from(&program),
            source,
        });
        let mut child = spawned?;
        let watched = watch(&child).and_then(|(pid, pidfd)| {
            let missing = || io::Error::other("it has no pipes");
            let input: OwnedFd = child.stdin.take().ok_or_else(missing)?.into();
            let output: OwnedFd = child.stdout.take().ok_or_else(missing)?.into();
            for pipe in [&input, &output] {
                // A smaller pipe is slower, not wrong.
                let _ = rustix::pipe::fcntl_setpipe_size(pipe, PIPE_BYTES);
            }
            Ok((pid, pidfd, input, output))
        });
        match watched {
            Ok((pid, pidfd, input, output)) => Ok(HostProcess {
                pid,
                pidfd,
                input: Some(input),
                output: Some(output),
            }),
            Err(source) => {
                // It is ours and not reaped: the pid is still its own.
                let _ = child.kill();
                let _ = child.wait();
                let pid = child.id();
                Err(SpawnError::Watch { pid, source })
            }
        }
    }
}

fn watch(child: &std::process::Child) -> io::Result<(i32, OwnedFd)> {
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    let process = Pid::from_raw(pid).ok_or_else(|| io::Error::other("it has no pid"))?;
    Ok((pid, pidfd_open(process, PidfdFlags::empty())?))
}

/// Has every descriptor but the first three closed at exec, also those that other code of this
/// process opened without saying so.
fn close_others_on_exec() -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: takes three numbers; marks descriptors and touches no memory. There is no safe
    // wrapper for it.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            CLOSE_RANGE_CLOEXEC,
        )
    };
    if done == 0 {
        return Ok(());
    }
    // Before Linux 5.11: one by one, as many as this process may have.
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    for number in 3..i32::try_from(most.unwrap_or(65_536)).unwrap_or(65_536) {
        // SAFETY: the descriptor is only marked, and one that is not open is refused.
        unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(())
}

/// The host beside this program, else the one in `PATH`.
#[must_use]
pub fn default_host() -> PathBuf {
    let own = std::env::current_exe().ok();
    own.map(|program| program.with_file_name(OWN_HOST))
        .filter(|path| path.is_file())
        .unwrap_or_else(|| Path::new(OWN_HOST).to_owned())
}

/// A host that was started and not reaped.
#[derive(Debug)]
pub(crate) struct HostProcess {
    pid: i32,
    pidfd: OwnedFd,
    input: Option<OwnedFd>,
    output: Option<OwnedFd>,
}

impl HostProcess {
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// The ends of its pipes, once.
    pub(crate) fn take_pipes(&mut self) -> Option<(OwnedFd, OwnedFd)> {
        self.input.take().zip(self.output.take())
    }

    /// Polls as readable once the process ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Who it is; `None` when it ended already.
    pub(crate) fn identity(&self) -> io::Result<Option<Identity>> {
        Identity::of(self.pid)
    }

    /// CPU time that it used so far.
    pub(crate) fn cpu_ticks(&self) -> Option<u64> {
        let stat = Stat::of(self.pid).ok()??;
        // One that waits for a processor has not been let show whether it works.
        (stat.state != 'R').then_some(stat.cpu_ticks)
    }

    pub(crate) fn signal(&self, signal: core::Signal) {
        // One that ended needs no signal, and nothing else can be wrong with a child of ours.
        let _ = pidfd_send_signal(&self.pidfd, number(signal));
    }

    /// How it ended; it stays a zombie. `None` while it runs. The status is lost where the program
    /// around this one ignores SIGCHLD or waits for any child.
    pub(crate) fn exit(&self) -> Option<core::Exit> {
        let status = match self.look() {
            Ok(status) => status?,
            Err(Errno::CHILD) if self.has_ended() => {
                tracing::warn!(
                    "another part of this program reaped the host with pid {}; how it ended is \
                     unknown, and what it left in its session is not ended",
                    self.pid
                );
                return Some(UNKNOWN_EXIT);
            }
            Err(_) => return None,
        };
        Some(match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => core::Exit::Code(code),
            (None, signal) => core::Exit::Signal(signal.unwrap_or_default()),
        })
    }

    fn look(&self) -> Result<Option<WaitIdStatus>, Errno> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::PidFd(self.pidfd.as_fd()), options)
    }

    fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
    }

    /// Whether its pid is still its own, and so is the id of its session.
    fn has_its_pid(&self) -> bool {
        !matches!(self.look(), Err(Errno::CHILD))
    }

    /// Sends every process in its session but itself a signal; answers how many there are.
    pub(crate) fn signal_session(&self, signal: core::Signal) -> usize {
        if !self.has_its_pid() {
            return 0;
        }
        session::signal_members(self.pid, number(signal))
    }

    /// How many processes are in its session beside itself.
    pub(crate) fn count_session(&self) -> usize {
        if !self.has_its_pid() {
            return 0;
        }
        session::members(self.pid).len()
    }

    /// Kills and reaps a host that nobody was told of, and what it started meanwhile.
    pub(crate) fn destroy(self) {
        self.signal(core::Signal::Kill);
        let wait = Timespec {
            tv_sec: DESTROY_SECS,
            tv_nsec: 0,
        };
        // Only the kernel itself can hold a killed process for longer; it is reaped at our end.
        let _ = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&wait));
        // Its end came first, so nothing is added to its session but by those that are in it.
        for _ in 0..MOST_SWEEPS {
            if self.signal_session(core::Signal::Kill) == 0 {
                break;
            }
        }
        self.reap();
    }

    /// Gives the zombie back to the kernel.
    pub(crate) fn reap(self) {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        // Somebody who reaped it before us did the same.
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), options);
    }
}

fn number(signal: core::Signal) -> Signal {
    match signal {
        core::Signal::Terminate => Signal::TERM,
        core::Signal::Continue => Signal::CONT,
        core::Signal::Kill => Signal::KILL,
    }
}

/// Reaps children of this process that it did not start: orphans that the kernel gave it as init
/// or as subreaper. `but` is a host that must stay a zombie for a while.
pub(crate) fn reap_strangers(but: Option<i32>) {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    for pid in session::all_pids() {
        let is_ours =
            matches!(Stat::of(pid), Ok(Some(stat)) if stat.ppid == own && stat.is_zombie());
        if is_ours
            && Some(pid) != but
            && let Some(pid) = Pid::from_raw(pid)
        {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            let _ = waitid(WaitId::Pid(pid), options);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    fn host(script: &str) -> HostProcess {
        let argv = ["sh", "-c", script].map(OsString::from).to_vec();
        let environment = std::env::vars_os().collect();
        HostCommand::new(argv, environment).spawn().unwrap()
    }

    /// The pid that a host says first.
    fn said(host: &mut HostProcess) -> i32 {
        let (_, output) = host.take_pipes().unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(std::fs::File::from(output));
        output.read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    }

    fn runs(pid: i32) -> bool {
        matches!(Stat::of(pid), Ok(Some(stat)) if !stat.is_zombie())
    }

    #[test]
    fn a_host_that_somebody_else_reaped_has_ended() {
        let mut host = host("sleep 1000 >/dev/null & echo $!; read line");
        let left = said(&mut host);
        assert_eq!(host.exit(), None);
        assert_eq!(host.count_session(), 1);
        host.signal(core::Signal::Kill);
        // As `waitpid(-1)` in another part of the program does it.
        let pid = Pid::from_raw(host.pid());
        waitid(WaitId::Pid(pid.unwrap()), WaitIdOptions::EXITED).unwrap();
        assert_eq!(host.exit(), Some(UNKNOWN_EXIT));
        // Its pid may be anybody's now.
        assert_eq!(host.signal_session(core::Signal::Kill), 0);
        assert_eq!(host.count_session(), 0);
        assert!(runs(left));
        rustix::process::kill_process(Pid::from_raw(left).unwrap(), Signal::KILL).unwrap();
    }

    #[test]
    fn what_a_destroyed_host_started_ends_with_it() {
        let mut host = host("sleep 1000 >/dev/null & echo $!; read line");
        let left = said(&mut host);
        host.destroy();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while runs(left) {
            assert!(std::time::Instant::now() < deadline, "{left} still runs");
            std::thread::yield_now();
        }
    }
}
