//! Ends the host that a dead supervisor left behind, and nothing else.
//!
//! Invariant: a process is signalled only through a pidfd whose process was just shown to be the
//! registered one. Invariant: doubt means no signal. Invariant: the host of a supervisor that lives is
//! no orphan, whatever copy of its record was found.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use turnhost_protocol::limits::{SESSION_WAIT_MS, TERMINATE_WAIT_MS};
use turnhost_protocol::process::{Identity, Stat, random_hex32};

use crate::registry::{Content, Record, ReferenceRecord, Registry, read_record};
use crate::session;

/// How often the session of a host that is asked to end is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What became of a registered host: SPEC §9.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing is registered.
    None,
    /// What lies there is no record.
    InvalidRegistry,
    /// The process is gone, or a zombie.
    NotRunning,
    /// A process has the pid, but it is not shown to be the registered one: it was left alone.
    PidReuseIgnored,
    /// It ended after SIGTERM.
    Terminated,
    /// It had to be killed.
    Killed,
}

impl Outcome {
    /// The word that is printed.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::InvalidRegistry => "invalid-registry",
            Self::NotRunning => "not-running",
            Self::PidReuseIgnored => "pid-reuse-ignored",
            Self::Terminated => "terminated",
            Self::Killed => "killed",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A record that was looked after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reaped {
    /// Where it lay.
    pub path: PathBuf,
    /// What became of its host.
    pub outcome: Outcome,
    /// The host's pid, where the record names one.
    pub pid: Option<i32>,
}

/// A record that could not be looked after.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct ReapError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Looks after the record of the home and the one of the reference, whose right `registry` is.
/// Both files are gone afterwards. The first entry is the home's own.
///
/// # Errors
/// A file cannot be read or removed, or a host does not end even by SIGKILL: its file stays.
pub fn reap(registry: &Registry) -> Result<Vec<Reaped>, ReapError> {
    let own = reap_file(registry, registry.path())?;
    let reference = reap_file(registry, &registry.home().reference_registry())?;
    let has_reference = reference.outcome != Outcome::None;
    Ok([own]
        .into_iter()
        .chain(has_reference.then_some(reference))
        .collect())
}

fn reap_file(registry: &Registry, path: &Path) -> Result<Reaped, ReapError> {
    let failed = |action| {
        move |source| ReapError {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let Some(content) = read_record(path).map_err(failed("read"))? else {
        return Ok(Reaped {
            path: path.to_owned(),
            outcome: Outcome::None,
            pid: None,
        });
    };
    let (outcome, pid) = match &content {
        Content::Invalid => (Ok(Outcome::InvalidRegistry), None),
        Content::Ours(record) if record.has_living_supervisor(registry.home().path()) => {
            let is_copy = path == registry.home().registry();
            if !is_copy {
                // A file that two homes were told to share: it stays with whoever wrote it.
                let why = format!(
                    "it belongs to supervisor {}, which lives; choose another --registry",
                    record.supervisor_pid
                );
                return Err(failed("take over")(io::Error::other(why)));
            }
            (Ok(Outcome::PidReuseIgnored), Some(record.host_pid))
        }
        Content::Ours(record) => (
            reap_process(record.host_pid, &**record),
            Some(record.host_pid),
        ),
        Content::Reference(record) => {
            (reap_process(record.host_pid, record), Some(record.host_pid))
        }
    };
    // The record of a host that lives on stays: nothing else remembers it.
    let outcome = outcome.map_err(failed("end the host registered in"))?;
    remove(path).map_err(failed("remove"))?;
    Ok(Reaped {
        path: path.to_owned(),
        outcome,
        pid,
    })
}

/// Removes a record, or whatever is in its place: a folder with something in it is moved aside.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(facts) if facts.is_dir() => fs::remove_dir(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            let mut aside = path.as_os_str().to_owned();
            aside.push(format!(".invalid-{}", random_hex32()));
            fs::rename(path, aside)
        }
        other => other,
    }
}

/// What a record says of its process.
trait Claim {
    /// Whether the live process `pid` is shown to be the registered one.
    fn is_shown_by(&self, pid: i32) -> bool;
}

impl Claim for Record {
    fn is_shown_by(&self, pid: i32) -> bool {
        matches!(Identity::of(pid), Ok(Some(identity)) if self.names(&identity))
    }
}

impl Claim for ReferenceRecord {
    fn is_shown_by(&self, pid: i32) -> bool {
        let (Some(registered), Some(started_at)) = (program(&self.argv), self.started_at) else {
            return false;
        };
        let Some(started) = start_time(pid) else {
            return false;
        };
        program(&command_line(pid)) == Some(registered) && started <= started_at
    }
}

/// What a command line runs: a module, a script, or a program. `None` where that is not certain;
/// an interpreter alone says nothing.
fn program(argv: &[String]) -> Option<&str> {
    let (first, rest) = argv.split_first()?;
    let name = file_name(first);
    if name == "env" {
        // Behind its assignments stands a whole command line; its flags may take words.
        let assignments = rest.iter().take_while(|word| word.contains('='));
        let command = &rest[assignments.count()..];
        return program(command).filter(|_| !command[0].starts_with('-'));
    }
    if is_one_of(&STARTERS, name) {
        return None;
    }
    if !is_one_of(&INTERPRETERS, name) {
        return Some(first);
    }
    let second = rest.first()?;
    if second == "-m" {
        return rest.get(1).map(String::as_str);
    }
    (!second.starts_with('-')).then_some(second)
}

/// Programs whose first word is what they run.
const INTERPRETERS: [&str; 19] = [
    "python", "pythonw", "pypy", "node", "nodejs", "ruby", "perl", "php", "java", "lua", "sh",
    "bash", "dash", "ash", "zsh", "ksh", "mksh", "fish", "tclsh",
];

/// Programs that run another one, whose place among their own words is not certain.
const STARTERS: [&str; 18] = [
    "uv", "uvx", "npx", "bun", "deno", "busybox", "sudo", "doas", "su", "nice", "ionice", "nohup",
    "timeout", "setsid", "stdbuf", "xargs", "unshare", "time",
];

fn file_name(program: &str) -> &str {
    program.rsplit('/').next().unwrap_or_default()
}

/// Whether `name` is one of `names`, with or without a version behind it.
fn is_one_of(names: &[&str], name: &str) -> bool {
    let without_version =
        name.trim_end_matches(|letter: char| letter.is_ascii_digit() || letter == '.');
    names.contains(&without_version)
}

fn command_line(pid: i32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = bytes
        .strip_suffix(b"\0")
        .unwrap_or(&bytes)
        .split(|byte| *byte == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

/// When a process started, in seconds since 1970.
fn start_time(pid: i32) -> Option<f64> {
    let stat = Stat::of(pid).ok()??;
    let since_boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let since_boot = since_boot.tv_sec as f64 + since_boot.tv_nsec as f64 / 1e9;
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .ok()?;
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Some(now.as_secs_f64() - since_boot + stat.start_ticks as f64 / per_second)
}

/// # Errors
/// The process is shown to be the registered one, and does not end.
fn reap_process(pid: i32, claim: &impl Claim) -> io::Result<Outcome> {
    // Neither init nor ourselves nor a group can be what was registered.
    let Some(process) = (pid > 1).then(|| Pid::from_raw(pid)).flatten() else {
        return Ok(Outcome::InvalidRegistry);
    };
    if process == rustix::process::getpid() {
        return Ok(Outcome::PidReuseIgnored);
    }
    let pidfd = match pidfd_open(process, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return Ok(Outcome::NotRunning),
        Err(_) => return Ok(Outcome::PidReuseIgnored),
    };
    // A descriptor that still shows a live process after the facts were read is of that process.
    let is_it = || claim.is_shown_by(pid) && !has_ended(&pidfd, Duration::ZERO);
    let stat = Stat::of(pid).ok().flatten();
    if stat.is_none_or(Stat::is_zombie) {
        return Ok(Outcome::NotRunning);
    }
    if !is_it() {
        return Ok(if has_ended(&pidfd, Duration::ZERO) {
            Outcome::NotRunning
        } else {
            Outcome::PidReuseIgnored
        });
    }
    let leads_session = stat.is_some_and(|stat| stat.session == pid);
    let mut session = Session::new(leads_session.then_some(pid));
    session.look(&pidfd);
    // What ends between the check and the signal needs none.
    let _ = pidfd_send_signal(&pidfd, Signal::TERM);
    let _ = pidfd_send_signal(&pidfd, Signal::CONT);
    let mut outcome = Outcome::Terminated;
    let wait = Duration::from_millis(TERMINATE_WAIT_MS);
    if !session.leader_ends(&pidfd, wait) {
        if !is_it() && !has_ended(&pidfd, Duration::ZERO) {
            // It became another program meanwhile, and what it is now was never registered.
            return Ok(Outcome::PidReuseIgnored);
        }
        session.look(&pidfd);
        if pidfd_send_signal(&pidfd, Signal::KILL).is_ok() {
            outcome = Outcome::Killed;
        }
        if !has_ended(&pidfd, wait) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the process {pid} lives on after SIGKILL"),
            ));
        }
    }
    session.end();
    Ok(outcome)
}

/// Whether the process of `pidfd` ends within `wait`.
fn has_ended(pidfd: &OwnedFd, wait: Duration) -> bool {
    let deadline = Instant::now() + wait;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
        match poll(&mut polled, Some(&left)) {
            Ok(ready) => return ready > 0,
            Err(Errno::INTR) => {}
            // Without an answer it counts as alive.
            Err(_) => return false,
        }
    }
}

/// What is in the session of a host beside itself.
struct Session {
    /// `None` where the host leads none.
    id: Option<i32>,
    /// Processes seen in it. While one of them lives, the id is not given out again.
    known: Vec<(i32, OwnedFd)>,
}

impl Session {
    fn new(id: Option<i32>) -> Self {
        Self {
            id,
            known: Vec::new(),
        }
    }

    /// Looks for processes that are not known yet, as long as the leader lives.
    fn look(&mut self, leader: &OwnedFd) {
        let Some(id) = self.id else { return };
        let fresh = Self::members(id);
        if !has_ended(leader, Duration::ZERO) {
            self.add(fresh);
        }
    }

    /// The same by one of those that are known: it keeps the id as the leader does.
    fn look_again(&mut self) {
        let Some(id) = self.id else { return };
        let fresh = Self::members(id);
        if self.lives() {
            self.add(fresh);
        }
    }

    /// Descriptors of the members; they are what they seem if the id is still taken afterwards.
    fn members(id: i32) -> Vec<(i32, OwnedFd)> {
        let open = |pid| {
            Some((
                pid,
                pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?,
            ))
        };
        let opened: Vec<_> = session::members(id).into_iter().filter_map(open).collect();
        // A pid that was given out again before it was opened is in the list no more.
        let still = session::members(id);
        opened
            .into_iter()
            .filter(|(pid, _)| still.contains(pid))
            .collect()
    }

    fn add(&mut self, fresh: Vec<(i32, OwnedFd)>) {
        self.known
            .retain(|(_, pidfd)| !has_ended(pidfd, Duration::ZERO));
        for (pid, pidfd) in fresh {
            if self.known.iter().all(|(known, _)| *known != pid) {
                self.known.push((pid, pidfd));
            }
        }
    }

    fn lives(&self) -> bool {
        self.known
            .iter()
            .any(|(_, pidfd)| !has_ended(pidfd, Duration::ZERO))
    }

    /// Whether the leader ends within `wait`. What it starts meanwhile is looked for whenever one
    /// of those that are known ends, and now and then, so that one is always known.
    fn leader_ends(&mut self, leader: &OwnedFd, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let nap = Timespec::try_from(left.min(LOOK_INTERVAL)).unwrap_or_default();
            let others = self.known.iter().map(|(_, pidfd)| pidfd);
            let mut polled: Vec<_> = std::iter::once(leader)
                .chain(others)
                .map(|pidfd| PollFd::new(pidfd, PollFlags::IN))
                .collect();
            // An interruption is seen as nothing that ended.
            let _ = poll(&mut polled, Some(&nap));
            if has_ended(leader, Duration::ZERO) {
                return true;
            }
            if left.is_zero() {
                return false;
            }
            self.look(leader);
        }
    }

    /// Ends what is left once the host itself ended.
    fn end(mut self) {
        let Some(id) = self.id else { return };
        let second = Duration::from_millis(SESSION_WAIT_MS);
        for signal in [Signal::TERM, Signal::KILL] {
            let deadline = Instant::now() + second;
            // What was started meanwhile is seen only as long as one of the old ones anchors it.
            self.look_again();
            let mut signalled = false;
            while self.lives() {
                if !signalled {
                    session::signal_members(id, signal);
                    session::signal_members(id, Signal::CONT);
                    signalled = true;
                }
                let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                    break;
                };
                let alive = self
                    .known
                    .iter()
                    .find(|(_, pidfd)| !has_ended(pidfd, Duration::ZERO));
                if let Some((_, alive)) = alive {
                    has_ended(alive, left);
                }
                self.look_again();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_command_line_runs_one_thing() {
        let check = |line: &str, expected: Option<&str>| {
            assert_eq!(program(&words(line)), expected, "{line}");
        };
        check(
            "/usr/bin/python3.11 -m tui_gateway.compute_host",
            Some("tui_gateway.compute_host"),
        );
        check("/opt/turnhost --home x", Some("/opt/turnhost"));
        check("python3 /srv/host.py -v", Some("/srv/host.py"));
        check("python3 -c code tui_gateway.compute_host", None);
        check("python3", None);
        check("/usr/bin/env python3", None);
        check("/usr/bin/env A=1 B= python3 host.py", Some("host.py"));
        check("env A=1 /opt/turnhost", Some("/opt/turnhost"));
        check("env -i /opt/turnhost", None);
        check("env A=1", None);
        check("env", None);
        for interpreter in ["nodejs", "java", "php8.2", "ksh", "fish"] {
            check(interpreter, None);
            check(&format!("/bin/{interpreter} host"), Some("host"));
        }
        for starter in ["uv", "busybox", "sudo", "nice", "timeout", "bun"] {
            check(starter, None);
            check(&format!("{starter} 10 host"), None);
        }
        check("vim -m tui_gateway.compute_host", Some("vim"));
        assert_eq!(program(&[]), None);
    }

    #[test]
    fn start_times_are_finer_than_seconds() {
        let before = SystemTime::now();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let started = start_time(i32::try_from(child.id()).unwrap()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let before = before
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs_f64();
        assert!((started - before).abs() < 0.5, "{started} {before}");
    }
}
