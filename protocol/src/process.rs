//! Process facts: clocks, random names, and who a process is.
//!
//! A pid alone names nobody, since the kernel gives it out again. [`Identity`] is what must still
//! be true of a process before anything may be done to it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// CLOCK_MONOTONIC now, in nanoseconds; other processes on this machine can compare it.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // The clock starts at boot: neither part is negative.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// A random name of 32 hex digits.
#[must_use]
pub fn random_hex32() -> String {
    let mut bytes = [0_u8; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            // Every Linux since 3.17 has it; without it, time and pid still tell names apart.
            Err(_) => {
                let pid = u64::from(std::process::id());
                bytes[..8].copy_from_slice(&monotonic_ns().to_ne_bytes());
                bytes[8..].copy_from_slice(&pid.to_ne_bytes());
                filled = bytes.len();
            }
        }
    }
    bytes
        .iter()
        .fold(String::with_capacity(32), |mut name, byte| {
            name.push(char::from_digit(u32::from(byte >> 4), 16).unwrap_or('0'));
            name.push(char::from_digit(u32::from(byte & 15), 16).unwrap_or('0'));
            name
        })
}

/// Memory of the process `pid` that is in RAM, in MiB.
///
/// # Errors
/// `/proc` cannot be read, or says something unknown; there is no such process.
pub fn resident_mib(pid: u32) -> io::Result<f64> {
    let path = format!("/proc/{pid}/statm");
    let statm = fs::read_to_string(&path)?;
    let pages: f64 = statm
        .split_ascii_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, path))?;
    Ok(pages * rustix::param::page_size() as f64 / (1024.0 * 1024.0))
}

/// Who a process is, beyond its pid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The process.
    pub pid: i32,
    /// When it started, in clock ticks since boot (10 ms each).
    pub start_ticks: u64,
    /// Which boot of the kernel `start_ticks` counts from.
    pub kernel_boot_id: String,
    /// The pid namespace that `pid` counts in: device and inode.
    pub pid_namespace: String,
    /// Its executable file, for people: a name that is no UTF-8 is changed when it is written down.
    #[serde(serialize_with = "crate::json::lossy_path")]
    pub exe: PathBuf,
    /// Device and inode of that file, which a rename does not change.
    pub exe_dev_inode: String,
}

impl Identity {
    /// The identity of the live process `pid`; `None` when there is none, or only a zombie.
    ///
    /// # Errors
    /// `/proc` cannot be read: not there, or another user's process.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        let Some(stat) = Stat::of(pid)? else {
            return Ok(None);
        };
        if stat.is_zombie() {
            return Ok(None);
        }
        let exe_link = format!("/proc/{pid}/exe");
        let read = || -> io::Result<Self> {
            let namespace = fs::metadata(format!("/proc/{pid}/ns/pid"))?;
            let exe = fs::metadata(&exe_link)?;
            Ok(Self {
                pid,
                start_ticks: stat.start_ticks,
                kernel_boot_id: kernel_boot_id()?,
                pid_namespace: format!("{}:{}", namespace.dev(), namespace.ino()),
                exe: fs::read_link(&exe_link)?,
                exe_dev_inode: format!("{}:{}", exe.dev(), exe.ino()),
            })
        };
        match read() {
            Ok(identity) => Ok(Some(identity)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The identity of this process.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn own() -> io::Result<Self> {
        let pid = i32::try_from(std::process::id()).map_err(io::Error::other)?;
        Self::of(pid)?.ok_or_else(|| io::Error::other("/proc does not show this process"))
    }
}

/// The id of this boot of the kernel.
///
/// # Errors
/// `/proc` cannot be read.
pub fn kernel_boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// What `/proc/<pid>/stat` says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// State letter: `R`, `S`, `D`, `T`, `Z` …
    pub state: char,
    /// The parent.
    pub ppid: i32,
    /// The process group.
    pub pgid: i32,
    /// The session.
    pub session: i32,
    /// Time used by the process itself, user and system, in clock ticks.
    pub cpu_ticks: u64,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

impl Stat {
    /// The facts of `pid`; `None` when there is no such process.
    ///
    /// # Errors
    /// `/proc` cannot be read, or says something unknown.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        let path = format!("/proc/{pid}/stat");
        match fs::read(&path) {
            Ok(text) => Self::parse(&String::from_utf8_lossy(&text))
                .map(Some)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, path)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether it has ended and only waits to be reaped.
    #[must_use]
    pub fn is_zombie(self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Fields are counted from behind the last `)`: the name before it may hold anything.
    fn parse(text: &str) -> Option<Self> {
        let (_, after_name) = text.rsplit_once(')')?;
        let fields: Vec<&str> = after_name.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let id = |index: usize| fields.get(index)?.parse::<i32>().ok();
        Some(Self {
            state: fields.first()?.chars().next()?,
            ppid: id(1)?,
            pgid: id(2)?,
            session: id(3)?,
            cpu_ticks: number(11)? + number(12)?,
            start_ticks: number(19)?,
        })
    }
}

fn is_gone(error: &io::Error) -> bool {
    let gone = rustix::io::Errno::SRCH.raw_os_error();
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_counts_from_behind_the_name() {
        let text = "42 (a b) c) R 1 2 3 0 -1 0 0 0 0 0 5 7 9 9 20 0 1 0 777 0 0";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(
            stat,
            Stat {
                state: 'R',
                ppid: 1,
                pgid: 2,
                session: 3,
                cpu_ticks: 12,
                start_ticks: 777
            }
        );
        assert_eq!(Stat::parse("42 (x) R 1"), None);
    }

    #[test]
    fn identity_is_stable_and_ends_with_the_process() {
        let own = Identity::own().unwrap();
        assert_eq!(Identity::of(own.pid).unwrap().as_ref(), Some(&own));
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let identity = Identity::of(pid).unwrap().unwrap();
        assert_ne!((identity.pid, &identity.exe), (own.pid, &own.exe));
        assert_eq!(identity.kernel_boot_id, own.kernel_boot_id);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(Identity::of(pid).unwrap(), None);
    }

    #[test]
    fn an_identity_with_any_path_can_be_written_down() {
        use std::os::unix::ffi::OsStringExt;
        let mut identity = Identity::own().unwrap();
        identity.exe = std::ffi::OsString::from_vec(b"/a\xff".to_vec()).into();
        let json = serde_json::to_string(&identity).unwrap();
        let back: Identity = serde_json::from_str(&json).unwrap();
        assert_eq!(back.exe, std::path::Path::new("/a\u{fffd}"));
    }

    #[test]
    fn names_are_random_hex() {
        let name = random_hex32();
        assert!(name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_ne!(name, random_hex32());
    }

    #[test]
    fn memory_is_some() {
        assert!(resident_mib(std::process::id()).unwrap() > 0.1);
        assert!(resident_mib(0).is_err());
    }
}
