//! Logs: to `<home>/logs/turnhost.log`, and to stderr.
//!
//! May use `protocol` only. Records go through a bounded channel to a thread of their own, so that
//! neither a slow disk nor a parent that does not read stderr ever holds up a turn; what does not
//! fit is counted and said. The file is rotated at 10 MiB, five old ones are kept: SPEC §2.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use turnhost_protocol::home::make_private_folder;
use turnhost_protocol::json;
use turnhost_protocol::limits::{LOG_FILE_BYTES, LOG_FILES};

/// Records that may wait for the disk.
const WAITING_RECORDS: usize = 4096;

/// Longest part of a record that stderr gets, in bytes: what a pipe that polls as writable takes.
const STDERR_BYTES: usize = 4096;

enum Message {
    Record(Vec<u8>),
    Flush(Sender<()>),
}

/// The way to the log thread.
#[derive(Clone)]
pub struct Log {
    messages: Sender<Message>,
    dropped: Arc<AtomicU64>,
}

impl Log {
    /// Starts the thread and makes it the subscriber of `tracing`. `filter` is a directive such as
    /// `info` or `turnhost=debug`; a malformed one is said and replaced by `info`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(folder: &Path, filter: &str) -> io::Result<Self> {
        let (messages, receiver) = bounded(WAITING_RECORDS);
        let log = Self {
            messages,
            dropped: Arc::default(),
        };
        let path = folder.join("turnhost.log");
        let dropped = Arc::clone(&log.dropped);
        thread::Builder::new()
            .name("log".into())
            .spawn(move || run(&receiver, path, &dropped))?;

        let (filter, malformed) = match EnvFilter::try_new(filter) {
            Ok(filter) => (filter, None),
            Err(error) => (EnvFilter::new("info"), Some(error)),
        };
        // A second subscriber would be a second host in one process; the first one stays.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(false)
            .with_target(false)
            .with_writer(log.clone())
            .try_init();
        if let Some(error) = malformed {
            tracing::warn!(%error, "the log filter cannot be used; logging at level info");
        }
        Ok(log)
    }

    /// Waits until what was logged so far is written, at most until `deadline`.
    pub fn finish(&self, deadline: Instant) {
        let (done, written) = bounded(1);
        if self
            .messages
            .send_deadline(Message::Flush(done), deadline)
            .is_ok()
        {
            // Too late, or the thread is gone: either way there is nothing more to wait for.
            let _ = written.recv_deadline(deadline);
        }
    }
}

/// Sends panics to the log instead of to stderr, which would wait for whoever does not read it.
pub fn say_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let message = json::quoted(message, PANIC_BYTES);
        let place = panic
            .location()
            .map(ToString::to_string)
            .unwrap_or_default();
        tracing::error!(message, place, "a thread panicked");
    }));
}

/// Longest message of a panic that is logged, in bytes.
const PANIC_BYTES: usize = 1024;

impl<'a> MakeWriter<'a> for Log {
    type Writer = Record<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        Record {
            log: self,
            bytes: Vec::with_capacity(128),
        }
    }
}

/// One record, sent when it is complete.
pub struct Record<'a> {
    log: &'a Log,
    bytes: Vec<u8>,
}

impl Write for Record<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        let record = std::mem::take(&mut self.bytes);
        if self.log.messages.try_send(Message::Record(record)).is_err() {
            self.log.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn run(messages: &Receiver<Message>, path: PathBuf, dropped: &AtomicU64) {
    let mut file = LogFile {
        path,
        open: None,
        failed: false,
    };
    for message in messages {
        match message {
            Message::Record(record) => {
                write_both(&mut file, &record);
                let lost = dropped.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    write_both(
                        &mut file,
                        format!("{lost} log records were lost\n").as_bytes(),
                    );
                }
            }
            Message::Flush(done) => drop(done),
        }
    }
}

fn write_both(file: &mut LogFile, record: &[u8]) {
    write_stderr(record);
    if let Err(error) = file.write(record)
        && !std::mem::replace(&mut file.failed, true)
    {
        let path = file.path.display();
        let advice = "logging to stderr only until it works again";
        write_stderr(format!("turnhost: cannot write {path}: {error}; {advice}\n").as_bytes());
    }
}

/// Writes to stderr if that does not block; nobody may be reading it.
fn write_stderr(record: &[u8]) {
    let stderr = rustix::stdio::stderr();
    let mut fds = [PollFd::from_borrowed_fd(stderr, PollFlags::OUT)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    if matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::OUT) {
        // Stderr is a copy for whoever looks; the file has the whole record.
        let mut shown = record[..record.len().min(STDERR_BYTES)].to_vec();
        if let Some(last) = shown.last_mut() {
            *last = b'\n';
        }
        let _ = rustix::io::write(stderr, &shown);
    }
}

struct LogFile {
    path: PathBuf,
    open: Option<(File, u64)>,
    /// The last write failed, and that was said.
    failed: bool,
}

impl LogFile {
    fn write(&mut self, record: &[u8]) -> io::Result<()> {
        if self
            .open
            .as_ref()
            .is_some_and(|(_, bytes)| *bytes >= LOG_FILE_BYTES)
        {
            self.rotate()?;
        }
        let (file, bytes) = match &mut self.open {
            Some(open) => open,
            closed @ None => closed.insert(open_log(&self.path)?),
        };
        file.write_all(record)?;
        *bytes += record.len() as u64;
        self.failed = false;
        Ok(())
    }

    /// Makes room for a new file. Another host of this home may have done so already.
    fn rotate(&mut self) -> io::Result<()> {
        let Some((file, _)) = self.open.take() else {
            return Ok(());
        };
        let (ours, current) = (file.metadata()?, std::fs::metadata(&self.path));
        if current.is_ok_and(|current| (current.dev(), current.ino()) == (ours.dev(), ours.ino())) {
            for age in (1..LOG_FILES).rev() {
                // A number that is missing leaves its place to the next younger one.
                let _ = std::fs::rename(self.aged(age), self.aged(age + 1));
            }
            std::fs::rename(&self.path, self.aged(1))?;
        }
        Ok(())
    }

    fn aged(&self, age: usize) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{age}"));
        name.into()
    }
}

fn open_log(path: &Path) -> io::Result<(File, u64)> {
    if let Some(folder) = path.parent() {
        make_private_folder(folder)?;
    }
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600);
    // Opening a pipe that nobody reads would hang, and so would writing to one.
    options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    let file = options.open(path)?;
    let facts = file.metadata()?;
    if facts.file_type().is_fifo() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is a pipe"));
    }
    Ok((file, facts.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_rotated_and_five_old_ones_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("logs/turnhost.log");
        let mut file = LogFile {
            path: path.clone(),
            open: None,
            failed: false,
        };
        let record = vec![b'x'; LOG_FILE_BYTES as usize];
        for _ in 0..8 {
            file.write(&record).unwrap();
        }
        file.write(b"last\n").unwrap();
        let mut names: Vec<String> = std::fs::read_dir(path.parent().unwrap())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        let expected = ["", ".1", ".2", ".3", ".4", ".5"].map(|age| format!("turnhost.log{age}"));
        assert_eq!(names, expected);
        assert_eq!(std::fs::read(&path).unwrap(), b"last\n");
    }
}
