//! The record of the running host, and the lock that its supervisor holds.
//!
//! Invariant: whoever changes the record holds the lock of the home. Invariant: a record is
//! removed only by the instance that wrote it, or after what it names was looked after.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use turnhost_protocol::file::{FileError, LockedFile, read_text, replace};
use turnhost_protocol::home::{Home, HomeError};
use turnhost_protocol::json::lossy_path;
use turnhost_protocol::process::{Identity, random_hex32};

/// Longest record that is read; command lines are the only long thing in it.
const MAX_RECORD_BYTES: u64 = 4 * 1024 * 1024;

/// Longest text about the holder of a lock that is read.
const MAX_HOLDER_BYTES: u64 = 4096;

/// What is written down of a running host: SPEC §9.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of SPEC §9")]
pub struct Record {
    pub host_pid: i32,
    pub host_start_ticks: u64,
    pub kernel_boot_id: String,
    pub pid_namespace: String,
    #[serde(serialize_with = "lossy_path")]
    pub host_exe: PathBuf,
    pub host_exe_dev_inode: String,
    pub pgid: i32,
    pub boot_id: String,
    pub build_sha: String,
    pub supervisor_pid: i32,
    pub supervisor_start_ticks: u64,
    pub instance_id: String,
    /// Seconds since 1970.
    pub started_at: f64,
    pub argv: Vec<String>,
    #[serde(serialize_with = "lossy_path")]
    pub home: PathBuf,
}

impl Record {
    /// Whether the live process `identity` is the one that was registered.
    #[must_use]
    pub fn names(&self, identity: &Identity) -> bool {
        identity.pid == self.host_pid
            && identity.start_ticks == self.host_start_ticks
            && identity.kernel_boot_id == self.kernel_boot_id
            && identity.pid_namespace == self.pid_namespace
            && identity.exe_dev_inode == self.host_exe_dev_inode
    }
}

impl Record {
    /// Whether the supervisor that wrote the record lives, other than the one of `home` in this
    /// process: then the host is not orphaned, whoever has a copy of its record.
    #[must_use]
    pub fn has_living_supervisor(&self, home: &Path) -> bool {
        let is_own = u32::try_from(self.supervisor_pid) == Ok(std::process::id());
        if is_own && self.home == home {
            return false;
        }
        matches!(
            Identity::of(self.supervisor_pid),
            Ok(Some(supervisor))
                if supervisor.start_ticks == self.supervisor_start_ticks
                    && supervisor.kernel_boot_id == self.kernel_boot_id
                    && supervisor.pid_namespace == self.pid_namespace
        )
    }
}

/// What the lock file says of its holder.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Holder {
    pub(crate) supervisor_pid: i32,
    pub(crate) supervisor_start_ticks: u64,
    instance_id: String,
}

impl Holder {
    /// Who holds the lock at `path`, or held it last, as the file says.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        // The lock is never taken on a link.
        let is_file = fs::symlink_metadata(path).ok()?.is_file();
        let text = is_file.then(|| read_text(path, MAX_HOLDER_BYTES))?;
        serde_json::from_str(&text.ok()?).ok()
    }
}

/// Why a home cannot be supervised.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another supervisor does so.
    #[error(
        "another supervisor{holder} holds {}; end it first, or choose another home with --home",
        path.display()
    )]
    Held {
        /// The lock.
        path: PathBuf,
        /// Its holder as ` (pid 1)`, where the file says so.
        holder: String,
    },
    /// The home cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The lock cannot be taken.
    #[error(transparent)]
    File(#[from] FileError),
    /// `/proc` does not show this process.
    #[error("cannot read who this process is: {0}; is /proc mounted?")]
    Own(io::Error),
}

/// The right to supervise a home, held until it is dropped.
#[derive(Debug)]
pub struct Registry {
    path: PathBuf,
    home: Home,
    own: Identity,
    instance_id: String,
    /// Kept for its lock.
    _lock: LockedFile,
}

impl Registry {
    /// Takes the lock of `home`. `path` is where the record lies, if not in the home.
    ///
    /// # Errors
    /// Another supervisor holds it, or it cannot be taken.
    pub fn lock(home: &Home, path: Option<PathBuf>) -> Result<Self, LockError> {
        home.open()?;
        let own = Identity::own().map_err(LockError::Own)?;
        let lock_path = home.lock();
        let Some(mut lock) = LockedFile::try_lock(&lock_path)? else {
            let holder = Holder::read(&lock_path);
            let holder = holder.map(|holder| format!(" (pid {})", holder.supervisor_pid));
            return Err(LockError::Held {
                path: lock_path,
                holder: holder.unwrap_or_default(),
            });
        };
        let holder = Holder {
            supervisor_pid: own.pid,
            supervisor_start_ticks: own.start_ticks,
            instance_id: random_hex32(),
        };
        lock.write(&to_json(&lock_path, &holder)?)?;
        Ok(Self {
            path: path.unwrap_or_else(|| home.registry()),
            home: home.clone(),
            own,
            instance_id: holder.instance_id,
            _lock: lock,
        })
    }

    /// Where the record lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The home.
    #[must_use]
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Writes down that the process `host` runs.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(
        &self,
        host: &Identity,
        argv: Vec<String>,
        boot_id: &str,
        build_sha: &str,
    ) -> Result<(), FileError> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let record = Record {
            host_pid: host.pid,
            host_start_ticks: host.start_ticks,
            kernel_boot_id: host.kernel_boot_id.clone(),
            pid_namespace: host.pid_namespace.clone(),
            host_exe: host.exe.clone(),
            host_exe_dev_inode: host.exe_dev_inode.clone(),
            // It leads a session of its own, and so a group.
            pgid: host.pid,
            boot_id: boot_id.to_owned(),
            build_sha: build_sha.to_owned(),
            supervisor_pid: self.own.pid,
            supervisor_start_ticks: self.own.start_ticks,
            instance_id: self.instance_id.clone(),
            started_at: now.map_or(0.0, |since| since.as_secs_f64()),
            argv,
            home: self.home.path().to_owned(),
        };
        replace(&self.path, &to_json(&self.path, &record)?)
    }

    /// Removes the record if this instance wrote it.
    pub(crate) fn remove_own(&self) {
        let is_own = matches!(read_record(&self.path), Ok(Some(Content::Ours(record)))
            if record.instance_id == self.instance_id);
        if is_own && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// A record of the reference: no start ticks.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct ReferenceRecord {
    pub(crate) host_pid: i32,
    #[serde(default)]
    pub(crate) started_at: Option<f64>,
    #[serde(default)]
    pub(crate) argv: Vec<String>,
}

/// What lies at the place of a record.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Content {
    /// A record of this program.
    Ours(Box<Record>),
    /// One of the reference.
    Reference(ReferenceRecord),
    /// Something else.
    Invalid,
}

/// Reads the record at `path`; `None` when nothing is there. Nothing is followed or waited for: a
/// link, a folder or a fifo is invalid.
///
/// # Errors
/// Its folder or the file cannot be read: what it says is then unknown, and may name a live host.
pub(crate) fn read_record(path: &Path) -> io::Result<Option<Content>> {
    let facts = match fs::symlink_metadata(path) {
        Ok(facts) => facts,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if !facts.is_file() {
        return Ok(Some(Content::Invalid));
    }
    let mut bytes = Vec::new();
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let read = File::options()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
        .and_then(|file| file.take(MAX_RECORD_BYTES).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(Some(parse(&bytes))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // It was replaced by a link meanwhile.
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            Ok(Some(Content::Invalid))
        }
        Err(error) => Err(error),
    }
}

fn parse(bytes: &[u8]) -> Content {
    let Ok(serde_json::Value::Object(fields)) = serde_json::from_slice(bytes) else {
        return Content::Invalid;
    };
    let is_reference = !fields.contains_key("host_start_ticks");
    let value = serde_json::Value::Object(fields);
    let content = if is_reference {
        serde_json::from_value(value).map(Content::Reference)
    } else {
        serde_json::from_value(value).map(|record| Content::Ours(Box::new(record)))
    };
    content.unwrap_or(Content::Invalid)
}

/// The text of `value`, which goes to `path`.
fn to_json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, FileError> {
    let mut json = serde_json::to_vec_pretty(value).map_err(|error| FileError {
        action: "write",
        path: path.to_owned(),
        source: error.into(),
    })?;
    json.push(b'\n');
    Ok(json)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn registry(folder: &Path, name: &[u8]) -> Registry {
        let path = folder.join(OsString::from_vec(name.to_vec()));
        let home = Home::find(Some(path), |_| None).unwrap();
        Registry::lock(&home, None).unwrap()
    }

    #[test]
    fn a_record_that_cannot_be_read_is_no_invalid_one() {
        // A regular file whose first page is never mapped: an I/O error.
        let error = read_record(Path::new("/proc/self/mem")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    }

    #[test]
    fn a_holder_is_read_from_a_plain_file_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let holder = r#"{"supervisor_pid":7,"supervisor_start_ticks":1,"instance_id":"i"}"#;
        fs::write(&path, holder).unwrap();
        assert_eq!(Holder::read(&path).unwrap().supervisor_pid, 7);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Holder::read(&link).is_none());
        fs::write(&path, " ".repeat(5_000) + holder).unwrap();
        assert!(Holder::read(&path).is_none());
        let fifo = folder.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(Holder::read(&fifo).is_none());
    }

    #[test]
    fn paths_that_are_no_text_make_a_record_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let registry = registry(folder.path(), b"home\xff");
        let mut host = Identity::own().unwrap();
        host.exe = OsString::from_vec(b"/bin/\xff".to_vec()).into();
        registry.write(&host, Vec::new(), "b", "").unwrap();
        let Some(Content::Ours(record)) = read_record(registry.path()).unwrap() else {
            panic!("no record: {:?}", fs::read(registry.path()));
        };
        assert!(record.names(&host));
        assert_eq!(record.host_exe, Path::new("/bin/\u{fffd}"));
        registry.remove_own();
        assert_eq!(read_record(registry.path()).unwrap(), None);
    }
}
