//! The writer thread, and the short way past it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use parking_lot::MutexGuard;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use turnhost_protocol::limits::WRITE_BYTES;

use super::Shared;

/// Bytes that a pipe which polls as writable takes without waiting (PIPE_BUF on Linux).
const ATOMIC_WRITE_BYTES: usize = 4096;

pub(super) fn start(
    shared: Arc<Shared>,
    on_closed: impl Fn() + Send + Sync + 'static,
) -> io::Result<()> {
    let writer = Arc::clone(&shared);
    let handle = thread::Builder::new()
        .name("writer".into())
        .spawn(move || run(&writer, &on_closed))?;
    // Nobody has the output yet, so nobody can have missed the thread. It lives as long as the process: it may stand in a write that the
    // parent never takes, so nobody waits for its end; `Output::finish` waits for its work.
    let _ = shared.writer.set(handle.thread().clone());
    Ok(())
}

fn run(shared: &Shared, on_closed: &dyn Fn()) {
    let mut batch = Vec::new();
    loop {
        shared.work.store(false, Ordering::Release);
        let stdout = shared.stdout.lock();
        if shared.is_closed() {
            drop(stdout);
            on_closed();
            return;
        }
        batch.clear();
        shared.take_batch(&mut batch);
        if batch.is_empty() {
            drop(stdout);
            if !shared.work.load(Ordering::Acquire) {
                thread::park();
            }
            continue;
        }
        shared.write_all(&stdout, &batch);
        drop(stdout);
        shared.take_off(batch.len());
        if batch.capacity() > 4 * WRITE_BYTES {
            batch = Vec::new();
        }
    }
}

impl Shared {
    /// Takes what goes out next: replies, the heartbeat, urgent lanes, then lanes of deltas. Each
    /// kind gets at least one chunk of every batch, so that no flood of one starves another.
    fn take_batch(&self, batch: &mut Vec<u8>) {
        if let Some(replies) = self.replies.lock().pop() {
            *batch = replies;
        }
        if let Some(heartbeat) = self.take_heartbeat() {
            self.add(heartbeat.len());
            batch.extend_from_slice(&heartbeat);
        }
        for urgent in [true, false] {
            while let Some(lane) = self.next_lane(urgent) {
                lane.take(self, urgent, batch);
                if batch.len() >= WRITE_BYTES {
                    break;
                }
            }
        }
    }

    fn next_lane(&self, urgent: bool) -> Option<Arc<super::Lane>> {
        let mut schedule = self.schedule.lock();
        if urgent {
            schedule.urgent.pop_front()
        } else {
            schedule.deltas.pop_front()
        }
    }

    fn take_heartbeat(&self) -> Option<Vec<u8>> {
        let waiting = self.heartbeat.swap(std::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: a pointer that is not null came from `Box::into_raw`, and the swap made it ours.
        (!waiting.is_null()).then(|| *unsafe { Box::from_raw(waiting) })
    }

    fn write_all(&self, stdout: &MutexGuard<'_, OwnedFd>, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match write(stdout, bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::AGAIN) => wait_writable(stdout),
                Err(error) => return self.close(error),
            }
        }
    }

    /// Nobody reads any more: let everything that waits go on.
    fn close(&self, error: Errno) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::warn!(%error, "cannot write to stdout; the parent takes no more frames");
        self.tell_waiting();
        for lane in self.lanes.lock().values() {
            lane.wake();
        }
        self.wake();
    }
}

/// Writes everything that is queued from the calling thread, if that cannot block; answers whether
/// it did.
pub(super) fn try_write(shared: &Shared) -> bool {
    if shared.unread() > ATOMIC_WRITE_BYTES {
        return false;
    }
    let Some(stdout) = shared.stdout.try_lock() else {
        return false;
    };
    if shared.is_closed() || !is_writable(&stdout) {
        return false;
    }
    let mut batch = Vec::new();
    shared.take_batch(&mut batch);
    // More may have come since the look at the count: a longer write could block.
    let written = match write(&stdout, &batch[..batch.len().min(ATOMIC_WRITE_BYTES)]) {
        Ok(count) => count,
        Err(Errno::AGAIN) => 0,
        Err(error) => {
            shared.close(error);
            return false;
        }
    };
    let rest = &batch[written..];
    let is_done = rest.is_empty();
    if !is_done {
        // It goes out before anything else, so a line that was cut goes on where it was.
        shared.replies.lock().push_front(rest.to_vec());
    }
    drop(stdout);
    shared.take_off(written);
    is_done
}

fn write(stdout: &OwnedFd, bytes: &[u8]) -> Result<usize, Errno> {
    loop {
        match rustix::io::write(stdout, bytes) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

fn is_writable(stdout: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(stdout, PollFlags::OUT)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::OUT)
}

/// Waits until a descriptor that does not block by itself takes more, or is closed.
fn wait_writable(stdout: &OwnedFd) {
    let mut fds = [PollFd::from_borrowed_fd(stdout.as_fd(), PollFlags::OUT)];
    // An interruption or an error shows at the next write.
    let _ = poll(&mut fds, None);
}
