//! Files that several processes write: atomic replacement, a lock, one record at a time.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::home::make_private_folder;

/// Something that failed on a file.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct FileError {
    /// What was tried.
    pub action: &'static str,
    /// On which path.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

impl FileError {
    fn new(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self {
            action,
            path,
            source,
        }
    }
}

/// The text of the regular file `path`, of at most `max_bytes`. Anything that reading could hang
/// on, such as a pipe, is refused.
///
/// # Errors
/// What the system said, or why the file is refused.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    let refuse = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, why));
    let no_wait = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(no_wait)
        .open(path)?;
    let facts = file.metadata()?;
    if !facts.is_file() {
        return refuse("it is no regular file".to_owned());
    }
    if facts.len() > max_bytes {
        return refuse(format!(
            "it has {} bytes, more than {max_bytes}",
            facts.len()
        ));
    }
    let mut text = String::new();
    file.take(max_bytes).read_to_string(&mut text)?;
    Ok(text)
}

/// Replaces `path` by `content`, mode 0600: a reader, also after a crash, sees the old file or the
/// new one, never a part.
///
/// # Errors
/// What failed; the old file is then still there.
pub fn replace(path: &Path, content: &[u8]) -> Result<(), FileError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    make_private_folder(folder).map_err(FileError::new("make the folder", folder))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}", crate::process::random_hex32()));
    let written = write_whole(&temporary, content)
        .and_then(|()| std::fs::rename(&temporary, path).map_err(FileError::new("replace", path)));
    if written.is_err() {
        // The error that is already known says more than one about the leftover.
        let _ = std::fs::remove_file(&temporary);
    }
    written?;
    let folder_file = File::open(folder).map_err(FileError::new("open the folder", folder))?;
    folder_file
        .sync_all()
        .map_err(FileError::new("sync the folder", folder))
}

fn write_whole(path: &Path, content: &[u8]) -> Result<(), FileError> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(FileError::new("create", path))?;
    file.write_all(content)
        .and_then(|()| file.sync_all())
        .map_err(FileError::new("write", path))
}

/// A file whose lock (flock, exclusive) is held as long as this value lives.
#[derive(Debug)]
pub struct LockedFile {
    file: File,
    path: PathBuf,
}

impl LockedFile {
    /// Takes the lock of `path` without waiting; `None` when another process holds it. The file
    /// is made with mode 0600, its folder with 0700.
    ///
    /// # Errors
    /// The file cannot be opened or locked.
    pub fn try_lock(path: &Path) -> Result<Option<Self>, FileError> {
        if let Some(folder) = path.parent() {
            make_private_folder(folder).map_err(FileError::new("make the folder", folder))?;
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
            .open(path)
            .map_err(FileError::new("open", path))?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self {
                file,
                path: path.to_owned(),
            })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(FileError::new("lock", path)(error.into())),
        }
    }

    /// Replaces what the file says about its holder.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, content: &[u8]) -> Result<(), FileError> {
        use std::os::unix::fs::FileExt;
        self.file
            .set_len(0)
            .and_then(|()| self.file.write_all_at(content, 0))
            .map_err(FileError::new("write", &self.path))
    }
}

/// Appends `record` to the log at `path` in one write, so that records of any number of threads
/// and processes stay whole. A missing line feed is added; the file is made with mode 0600, its
/// folders with 0700.
///
/// # Errors
/// The file cannot be opened, or took only a part of the record (a full disk).
pub fn append_log_record(path: &Path, record: &str) -> Result<(), FileError> {
    if let Some(folder) = path.parent() {
        make_private_folder(folder).map_err(FileError::new("make the folder", folder))?;
    }
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
        .map_err(FileError::new("open", path))?;
    let mut line = Vec::with_capacity(record.len() + 1);
    line.extend_from_slice(record.as_bytes());
    if !record.ends_with('\n') {
        line.push(b'\n');
    }
    let failed = FileError::new("append to", path);
    match file.write(&line) {
        Ok(written) if written == line.len() => Ok(()),
        Ok(written) => {
            let message = format!("only {written} of {} bytes were written", line.len());
            Err(failed(io::Error::new(io::ErrorKind::WriteZero, message)))
        }
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn records_of_many_threads_stay_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("logs/agent.log");
        std::thread::scope(|scope| {
            for index in 0..32 {
                let path = &path;
                scope.spawn(move || {
                    let record = format!("line-{index:03}-{}", "x".repeat(2000));
                    append_log_record(path, &record).unwrap();
                });
            }
        });
        let text = std::fs::read_to_string(&path).unwrap();
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        let expected: Vec<String> = (0..32)
            .map(|index| format!("line-{index:03}-{}", "x".repeat(2000)))
            .collect();
        assert_eq!(lines, expected);
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    }

    #[test]
    fn a_full_disk_is_an_error_of_the_caller() {
        let error = append_log_record(Path::new("/dev/full"), "x")
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "cannot append to /dev/full: No space left on device (os error 28)"
        );
    }

    #[test]
    fn a_line_feed_is_added_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        append_log_record(&path, "a").unwrap();
        append_log_record(&path, "b\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a\nb\n");
    }

    #[test]
    fn replacement_is_private_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/record.json");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(
            std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
            1
        );
        let taken = folder.path().join("folder");
        std::fs::create_dir(&taken).unwrap();
        assert!(
            replace(&taken, b"x")
                .unwrap_err()
                .to_string()
                .starts_with("cannot replace")
        );
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn only_regular_files_of_bounded_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        let refused = |path: &Path| read_text(path, 4).unwrap_err().to_string();
        assert_eq!(refused(&path), "it has 5 bytes, more than 4");
        assert_eq!(refused(folder.path()), "it is no regular file");
        assert_eq!(refused(Path::new("/dev/zero")), "it is no regular file");
        let fifo = folder.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(refused(&fifo), "it is no regular file");
    }

    #[test]
    fn a_lock_has_one_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/lock");
        let mut held = LockedFile::try_lock(&path).unwrap().unwrap();
        held.write(b"pid 1").unwrap();
        assert!(LockedFile::try_lock(&path).unwrap().is_none());
        assert_eq!(std::fs::read(&path).unwrap(), b"pid 1");
        drop(held);
        assert!(LockedFile::try_lock(&path).unwrap().is_some());
    }
}
