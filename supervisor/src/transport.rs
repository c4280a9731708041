//! Bytes in and out that never wait.
//!
//! One thread serves all of them, so nothing here may block: a read happens once for each time the
//! descriptor was found readable, a write takes what the other side takes now, the rest stays
//! queued. The memory pipes stand where a gateway is a part of the same process.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, IoSlice, ReadWriteFlags};

/// Bytes that a descriptor which polls as writable takes without waiting (PIPE_BUF on Linux).
const ATOMIC_WRITE_BYTES: usize = 4096;

/// Memory that an emptied queue may keep.
const KEPT_CAPACITY_BYTES: usize = 256 * 1024;

/// Where lines come from.
pub(crate) trait Source: Read {
    /// What is polled for input.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The descriptor was found readable: the next read will not wait.
    fn set_ready(&mut self);

    /// What is polled, and for what, while input is left where it is: it shows the end only.
    fn hangup(&self) -> (BorrowedFd<'_>, PollFlags);
}

/// Where lines go.
pub(crate) trait Sink {
    /// Queues bytes.
    fn push(&mut self, bytes: &[u8]);

    /// Hands over what is taken now.
    ///
    /// # Errors
    /// Nobody reads any more.
    fn flush(&mut self) -> io::Result<()>;

    /// Bytes that nobody has taken yet.
    fn waiting(&self) -> usize;

    /// What is polled, and for what, while bytes wait.
    fn wait_for(&self) -> (BorrowedFd<'_>, PollFlags);
}

/// The reading end of a pipe, socket, terminal or file that others may share: it is never set to
/// non-blocking mode.
pub(crate) struct FdSource {
    fd: OwnedFd,
    ready: bool,
    /// Bytes that were read in all.
    read: u64,
}

impl FdSource {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            ready: false,
            read: 0,
        }
    }

    /// Bytes that were read in all.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read
    }
}

impl Read for FdSource {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !std::mem::take(&mut self.ready) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = rustix::io::read(&self.fd, into)?;
        self.read += count as u64;
        Ok(count)
    }
}

impl Source for FdSource {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn set_ready(&mut self) {
        self.ready = true;
    }

    fn hangup(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.fd.as_fd(), PollFlags::RDHUP)
    }
}

/// The writing end of the same, with a queue before it.
pub(crate) struct FdSink {
    fd: OwnedFd,
    queue: Vec<u8>,
    /// Bytes of the queue that were written.
    start: usize,
    /// Bytes that were written in all.
    written: u64,
}

impl FdSink {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            queue: Vec::new(),
            start: 0,
            written: 0,
        }
    }

    /// Bytes that were written in all.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }
}

impl Sink for FdSink {
    fn push(&mut self, bytes: &[u8]) {
        if self.start > KEPT_CAPACITY_BYTES && self.start > self.queue.len() / 2 {
            self.queue.drain(..self.start);
            self.start = 0;
        }
        self.queue.extend_from_slice(bytes);
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.start < self.queue.len() {
            match write_now(self.fd.as_fd(), &self.queue[self.start..]) {
                Ok(count) => {
                    self.start += count;
                    self.written += count as u64;
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.start = 0;
        self.queue.clear();
        self.queue.shrink_to(KEPT_CAPACITY_BYTES);
        Ok(())
    }

    fn waiting(&self) -> usize {
        self.queue.len() - self.start
    }

    fn wait_for(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.fd.as_fd(), PollFlags::OUT)
    }
}

/// Writes what `fd` takes without waiting; [`Errno::AGAIN`] when that is nothing.
pub(crate) fn write_now(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    // The offset of a stream is given as -1.
    let slices = [IoSlice::new(bytes)];
    match rustix::io::pwritev2(fd, &slices, u64::MAX, ReadWriteFlags::NOWAIT) {
        Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::SPIPE) => {}
        done => return done,
    }
    // A terminal, a file, or an old kernel cannot promise not to wait; then a little goes out
    // where the descriptor polls as writable.
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    if poll(&mut polled, Some(&Timespec::default()))? == 0 {
        return Err(Errno::AGAIN);
    }
    rustix::io::write(fd, &bytes[..bytes.len().min(ATOMIC_WRITE_BYTES)])
}

/// A pipe inside this process: whole frames go in, bytes come out.
struct Memory {
    state: Mutex<MemoryState>,
    /// There is something to read, or there never will be.
    readable: Condvar,
    /// The same as a descriptor, for a reader that polls; or that there is room, for a writer.
    event: OwnedFd,
    /// Readable once the pipe is closed.
    hangup: OwnedFd,
}

#[derive(Default)]
struct MemoryState {
    bytes: Vec<u8>,
    /// Bytes of them that were read. They are removed rarely, since all others move then.
    start: usize,
    closed: bool,
}

impl MemoryState {
    /// What nobody has read yet.
    fn unread(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.start > KEPT_CAPACITY_BYTES && self.start > self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn read(&mut self, into: &mut [u8]) -> usize {
        let unread = self.unread();
        let count = unread.len().min(into.len());
        into[..count].copy_from_slice(&unread[..count]);
        self.start += count;
        if self.start == self.bytes.len() {
            self.start = 0;
            self.bytes.clear();
            self.bytes.shrink_to(KEPT_CAPACITY_BYTES);
        }
        count
    }
}

impl Memory {
    fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            state: Mutex::default(),
            readable: Condvar::new(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            hangup: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    fn signal(&self) {
        raise(&self.event);
    }

    fn clear(&self) {
        // Nothing to clear is fine.
        let _ = rustix::io::read(&self.event, &mut [0_u8; 8][..]);
    }

    fn close(&self) {
        self.state.lock().closed = true;
        self.readable.notify_all();
        self.signal();
        raise(&self.hangup);
    }
}

fn raise(event: &OwnedFd) {
    // A counter that is full is readable already.
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// Why a memory pipe takes no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PushError {
    /// Too much waits already.
    Full,
    /// Nobody reads any more.
    Closed,
}

/// A pipe from any thread to one that polls.
pub(crate) fn memory_to_poller(limit_bytes: usize) -> io::Result<(MemoryWriter, MemorySource)> {
    let memory = Memory::new()?;
    let writer = MemoryWriter {
        memory: Arc::clone(&memory),
        limit_bytes,
    };
    let source = MemorySource {
        memory,
        ready: false,
    };
    Ok((writer, source))
}

/// A pipe from a thread that polls to one that waits.
pub(crate) fn memory_from_poller() -> io::Result<(MemorySink, MemoryReader)> {
    let memory = Memory::new()?;
    let sink = MemorySink {
        memory: Arc::clone(&memory),
    };
    Ok((sink, MemoryReader { memory }))
}

/// The end that other threads write to. Dropping it ends the stream.
pub(crate) struct MemoryWriter {
    memory: Arc<Memory>,
    limit_bytes: usize,
}

impl MemoryWriter {
    /// Takes one line whole, or not at all.
    pub(crate) fn push_line(&self, line: &[u8]) -> Result<(), PushError> {
        let mut state = self.memory.state.lock();
        if state.closed {
            return Err(PushError::Closed);
        }
        if state.unread().len() + line.len() > self.limit_bytes {
            return Err(PushError::Full);
        }
        state.push(line);
        state.push(b"\n");
        drop(state);
        self.memory.signal();
        Ok(())
    }

    /// Ends the stream after what was pushed.
    pub(crate) fn close(&self) {
        self.memory.close();
    }
}

impl Drop for MemoryWriter {
    fn drop(&mut self) {
        self.close();
    }
}

/// The end that a polling thread reads.
pub(crate) struct MemorySource {
    memory: Arc<Memory>,
    ready: bool,
}

impl Read for MemorySource {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !std::mem::take(&mut self.ready) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut state = self.memory.state.lock();
        let count = state.read(into);
        if count == 0 {
            return if state.closed {
                Ok(0)
            } else {
                Err(io::ErrorKind::WouldBlock.into())
            };
        }
        if state.bytes.is_empty() && !state.closed {
            self.memory.clear();
        }
        Ok(count)
    }
}

impl Source for MemorySource {
    fn fd(&self) -> BorrowedFd<'_> {
        self.memory.event.as_fd()
    }

    fn set_ready(&mut self) {
        self.ready = true;
    }

    fn hangup(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.memory.hangup.as_fd(), PollFlags::IN)
    }
}

impl Drop for MemorySource {
    fn drop(&mut self) {
        self.memory.close();
    }
}

/// The end that a polling thread writes to. Dropping it ends the stream.
pub(crate) struct MemorySink {
    memory: Arc<Memory>,
}

impl Sink for MemorySink {
    fn push(&mut self, bytes: &[u8]) {
        self.memory.state.lock().bytes.extend_from_slice(bytes);
    }

    fn flush(&mut self) -> io::Result<()> {
        self.memory.clear();
        let state = self.memory.state.lock();
        if state.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if !state.bytes.is_empty() {
            self.memory.readable.notify_all();
        }
        Ok(())
    }

    fn waiting(&self) -> usize {
        self.memory.state.lock().bytes.len()
    }

    fn wait_for(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.memory.event.as_fd(), PollFlags::IN)
    }
}

impl Drop for MemorySink {
    fn drop(&mut self) {
        self.memory.close();
    }
}

/// The end that a waiting thread reads.
pub(crate) struct MemoryReader {
    memory: Arc<Memory>,
}

impl MemoryReader {
    /// Waits for bytes and swaps them into `into`, which is empty; `false` at the end.
    pub(crate) fn take(&self, into: &mut Vec<u8>) -> bool {
        let mut state = self.memory.state.lock();
        while state.bytes.is_empty() && !state.closed {
            self.memory.readable.wait(&mut state);
        }
        into.clear();
        std::mem::swap(&mut state.bytes, into);
        drop(state);
        self.memory.signal();
        !into.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pipe_takes_what_it_takes() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut sink = FdSink::new(writer);
        let bytes = vec![7; 300_000];
        sink.push(&bytes);
        sink.flush().unwrap();
        let taken = sink.written();
        assert!(taken > 0 && taken < 300_000);
        assert_eq!(sink.waiting() as u64, 300_000 - taken);
        let mut source = FdSource::new(reader);
        let mut seen = 0;
        let mut buffer = vec![0; 100_000];
        while seen < 300_000 {
            source.set_ready();
            seen += source.read(&mut buffer).unwrap();
            sink.flush().unwrap();
        }
        assert_eq!((sink.waiting(), sink.written()), (0, 300_000));
        assert!(sink.queue.capacity() <= KEPT_CAPACITY_BYTES);
        let would_block = source.read(&mut buffer).unwrap_err();
        assert_eq!(would_block.kind(), io::ErrorKind::WouldBlock);
        drop(source);
        sink.push(b"x");
        assert_eq!(sink.flush().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_file_takes_everything() {
        let file = tempfile::tempfile().unwrap();
        let mut sink = FdSink::new(file.try_clone().unwrap().into());
        sink.push(&vec![7; 100_000]);
        for _ in 0..100 {
            sink.flush().unwrap();
        }
        assert_eq!(sink.waiting(), 0);
        assert_eq!(file.metadata().unwrap().len(), 100_000);
    }

    #[test]
    fn a_memory_pipe_takes_whole_lines_only() {
        let (writer, mut source) = memory_to_poller(10).unwrap();
        writer.push_line(b"12345").unwrap();
        assert_eq!(writer.push_line(b"12345"), Err(PushError::Full));
        let mut read = || {
            source.set_ready();
            source.read(&mut [0; 64]).ok()
        };
        assert_eq!(read(), Some(6));
        assert_eq!(read(), None);
        writer.push_line(b"12345").unwrap();
        writer.close();
        assert_eq!(writer.push_line(b"1"), Err(PushError::Closed));
        assert_eq!(read(), Some(6));
        assert_eq!(read(), Some(0));
    }

    #[test]
    fn a_full_memory_pipe_is_read_in_time_that_grows_with_its_bytes() {
        let (writer, mut source) = memory_to_poller(64 << 20).unwrap();
        let line = vec![7; (1 << 20) - 1];
        for _ in 0..64 {
            writer.push_line(&line).unwrap();
        }
        let began = std::time::Instant::now();
        let mut buffer = vec![0; 4096];
        for _ in 0..16_384 {
            source.set_ready();
            assert_eq!(source.read(&mut buffer).unwrap(), 4096);
        }
        // Moving what is left at each read would be 512 GiB of copies.
        assert!(began.elapsed() < std::time::Duration::from_secs(5));
        assert!(writer.memory.state.lock().bytes.capacity() <= KEPT_CAPACITY_BYTES);
    }

    #[test]
    fn a_waiting_reader_wakes_at_bytes_and_at_the_end() {
        let (mut sink, reader) = memory_from_poller().unwrap();
        let thread = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let mut seen = Vec::new();
            while reader.take(&mut bytes) {
                seen.extend_from_slice(&bytes);
            }
            seen
        });
        sink.push(b"a\n");
        sink.flush().unwrap();
        drop(sink);
        assert_eq!(thread.join().unwrap(), b"a\n");
    }
}
