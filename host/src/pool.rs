//! The workers, and the place that a waiting turn gives up.
//!
//! May use `protocol` only.
//!
//! A job runs on a thread of its own from the pool's spare ones. What is bounded is the number of
//! *places*: a job holds one while it computes, and gives it up while it waits for a person, so
//! that any number of open questions leaves all workers to others.
//!
//! Invariant: jobs that hold a place, plus jobs that come back for theirs, are at most `workers`
//! before a queued job starts; those that come back go first.
//! Invariant: a job that was withdrawn never runs, and one that runs can no longer be withdrawn.
//! Invariant: the pool's lock is held for bookkeeping only, never while a job runs or waits.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::{Condvar, Mutex};
use turnhost_protocol::limits::{MAX_ABANDONED_TURNS, MAX_WAITING_TURNS};

/// Stack of a worker, in bytes. Address space; memory is taken where it is touched.
const STACK_BYTES: usize = 2 * 1024 * 1024;

/// Tells jobs apart.
pub type JobId = u64;

type Job = Box<dyn FnOnce(&Place) + Send>;

/// Runs jobs, a bounded number at once.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    workers: usize,
    state: Mutex<State>,
    work: Condvar,
    returning: Condvar,
    counts: Counts,
}

/// What the heartbeat reads, without the lock.
#[derive(Default)]
struct Counts {
    queued: AtomicUsize,
    active: AtomicUsize,
    waiting: AtomicUsize,
    abandoned: AtomicUsize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(JobId, Job)>,
    running: HashMap<JobId, Running>,
    /// Places that are taken.
    computing: usize,
    /// Jobs that want their place back.
    coming_back: usize,
    /// Jobs that wait without a place.
    waiting: usize,
    /// Jobs that were given up while they hold their thread.
    abandoned: usize,
    /// Threads that wait for a job.
    idle: usize,
    threads: usize,
}

struct Running {
    holds_place: bool,
    /// Gave its place up to wait, and did not get it back yet.
    waits: bool,
    /// Wants its place back.
    comes_back: bool,
    abandoned: bool,
    /// Parts of the job that run at once; how many of them wait for a person, and how many for
    /// other parts.
    branches: usize,
    waiting: usize,
    joining: usize,
}

/// How busy a pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Jobs that no worker has taken.
    pub queued: usize,
    /// Jobs that run, computing or waiting.
    pub active: usize,
    /// Of those, the ones that gave their place up.
    pub waiting: usize,
    /// Of those, the ones that were given up and still unwind.
    pub abandoned: usize,
}

/// No thread can be started, and none is there.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a worker thread: {0}")]
pub struct NoThread(std::io::Error);

impl Pool {
    /// A pool of `workers` places. Threads are started when there is work.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                workers,
                state: Mutex::default(),
                work: Condvar::new(),
                returning: Condvar::new(),
                counts: Counts::default(),
            }),
        }
    }

    /// Queues `job`; answers how many jobs wait for a worker now.
    ///
    /// # Errors
    /// No thread could ever run it: the job is dropped, and never ran.
    pub fn submit(
        &self,
        id: JobId,
        job: impl FnOnce(&Place) + Send + 'static,
    ) -> Result<usize, NoThread> {
        let mut state = self.shared.state.lock();
        state.queue.push_back((id, Box::new(job)));
        if let Err(error) = self.shared.staff(&mut state) {
            if state.threads == 0 {
                state.queue.pop_back();
                return Err(NoThread(error));
            }
            tracing::warn!(%error, "cannot start a worker thread; the turn waits for another one");
        }
        self.shared.publish(&state);
        Ok(state.queue.len())
    }

    /// Takes a job out of the queue; answers whether it was there, and thus never runs.
    #[must_use]
    pub fn withdraw(&self, id: JobId) -> bool {
        let mut state = self.shared.state.lock();
        let Some(at) = state.queue.iter().position(|(queued, _)| *queued == id) else {
            return false;
        };
        let job = state.queue.remove(at);
        self.shared.publish(&state);
        drop(state);
        // What the job holds is dropped outside the lock.
        drop(job);
        true
    }

    /// Gives up a job that does not end: its place goes to others, a bounded number of times.
    pub fn abandon(&self, id: JobId) {
        let mut state = self.shared.state.lock();
        if state.abandoned >= MAX_ABANDONED_TURNS {
            return;
        }
        let Some(running) = state.running.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut running.abandoned, true) {
            return;
        }
        let held = std::mem::take(&mut running.holds_place);
        let waited = std::mem::take(&mut running.waits);
        let came_back = std::mem::take(&mut running.comes_back);
        state.computing -= usize::from(held);
        state.waiting -= usize::from(waited);
        state.coming_back -= usize::from(came_back);
        state.abandoned += 1;
        // Its own parts no longer need a place.
        self.shared.returning.notify_all();
        self.shared.fill_place(&mut state);
    }

    /// How many jobs would wait for a place if one more came.
    #[must_use]
    pub fn backlog_with_one_more(&self) -> usize {
        let state = self.shared.state.lock();
        let taken = state.computing + state.coming_back;
        (state.queue.len() + 1).saturating_sub(self.shared.workers.saturating_sub(taken))
    }

    /// How busy the pool is. Takes no lock.
    #[must_use]
    pub fn load(&self) -> Load {
        let read = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        let counts = &self.shared.counts;
        Load {
            queued: read(&counts.queued),
            active: read(&counts.active),
            waiting: read(&counts.waiting),
            abandoned: read(&counts.abandoned),
        }
    }

    /// How many jobs may compute at once.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.shared.workers
    }
}

/// The right of a running job to compute.
pub struct Place {
    shared: Arc<Shared>,
    id: JobId,
}

impl Place {
    /// Runs `wait`, which waits for a person, without holding the place. Comes back only when
    /// there is a place again. Where parts of the job still compute, the place stays theirs.
    pub fn give_up_while<T>(&self, wait: impl FnOnce() -> T) -> T {
        let _away = self.step_back(Away::Waits);
        wait()
    }

    /// Runs `join`, which waits for branches of this job: the place is theirs meanwhile, and is
    /// given up when they all wait for a person.
    pub fn join_while<T>(&self, join: impl FnOnce() -> T) -> T {
        let _away = self.step_back(Away::Joins);
        join()
    }

    /// Counts a further part of the job that runs at once with the others, until the guard drops.
    #[must_use]
    pub fn branch(&self) -> Branch<'_> {
        let mut state = self.shared.state.lock();
        if let Some(running) = state.running.get_mut(&self.id) {
            running.branches += 1;
        }
        Branch { place: self }
    }

    fn step_back(&self, away: Away) -> SteppedBack<'_> {
        let mut state = self.shared.state.lock();
        if let Some(running) = state.running.get_mut(&self.id) {
            running.waiting += usize::from(away == Away::Waits);
            running.joining += usize::from(away == Away::Joins);
        }
        self.shared.release_if_all_wait(&mut state, self.id);
        SteppedBack { place: self, away }
    }

    fn come_back(&self, away: Away) {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        if let Some(running) = state.running.get_mut(&self.id) {
            running.waiting -= usize::from(away == Away::Waits);
            running.joining -= usize::from(away == Away::Joins);
        }
        loop {
            let State {
                running,
                computing,
                coming_back,
                waiting,
                ..
            } = &mut *state;
            let Some(job) = running.get_mut(&self.id) else {
                return;
            };
            if job.holds_place || job.abandoned {
                break;
            }
            if *computing < shared.workers {
                job.holds_place = true;
                *computing += 1;
                *waiting -= usize::from(std::mem::take(&mut job.waits));
                *coming_back -= usize::from(std::mem::take(&mut job.comes_back));
                // Other parts of the same job may wait for the place that is theirs again.
                shared.returning.notify_all();
                break;
            }
            *coming_back += usize::from(!std::mem::replace(&mut job.comes_back, true));
            shared.returning.wait(&mut state);
        }
        // One that no longer comes back may leave room for a queued job.
        shared.fill_place(&mut state);
    }
}

/// Why a part of a job does not compute.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Away {
    /// It waits for a person.
    Waits,
    /// It waits for branches of its own job.
    Joins,
}

/// A part of a job that does not compute; it comes back when this drops, also by a panic.
struct SteppedBack<'a> {
    place: &'a Place,
    away: Away,
}

impl Drop for SteppedBack<'_> {
    fn drop(&mut self) {
        self.place.come_back(self.away);
    }
}

/// A part of a job that runs at once with the others.
pub struct Branch<'a> {
    place: &'a Place,
}

impl Drop for Branch<'_> {
    fn drop(&mut self) {
        let shared = &self.place.shared;
        let mut state = shared.state.lock();
        if let Some(running) = state.running.get_mut(&self.place.id) {
            running.branches -= 1;
        }
        // The others may all be waiting.
        shared.release_if_all_wait(&mut state, self.place.id);
    }
}

impl Shared {
    fn publish(&self, state: &State) {
        self.counts
            .queued
            .store(state.queue.len(), Ordering::Relaxed);
        self.counts
            .active
            .store(state.running.len(), Ordering::Relaxed);
        self.counts.waiting.store(state.waiting, Ordering::Relaxed);
        self.counts
            .abandoned
            .store(state.abandoned, Ordering::Relaxed);
    }

    fn may_start(&self, state: &State) -> bool {
        state.computing + state.coming_back < self.workers && !state.queue.is_empty()
    }

    /// Sees to it that a thread takes the next job, where one may start.
    fn staff(self: &Arc<Self>, state: &mut State) -> std::io::Result<()> {
        if !self.may_start(state) {
            return Ok(());
        }
        if state.idle > 0 {
            self.work.notify_one();
            return Ok(());
        }
        let shared = Arc::clone(self);
        thread::Builder::new()
            .name("worker".into())
            .stack_size(STACK_BYTES)
            .spawn(move || shared.work())?;
        state.threads += 1;
        Ok(())
    }

    /// A place became free: whoever wants one back gets it, then the next job.
    fn fill_place(self: &Arc<Self>, state: &mut State) {
        if state.coming_back > 0 {
            self.returning.notify_all();
        }
        if let Err(error) = self.staff(state) {
            tracing::warn!(%error, "cannot start a worker thread; queued turns wait");
        }
        self.publish(state);
    }

    fn release_if_all_wait(self: &Arc<Self>, state: &mut State, id: JobId) {
        if state.waiting >= MAX_WAITING_TURNS {
            return;
        }
        let Some(running) = state.running.get_mut(&id) else {
            return;
        };
        // Parts that only join go on by themselves when nobody waits for a person.
        let computes = running.waiting + running.joining < running.branches;
        if !running.holds_place || computes || running.waiting == 0 {
            return;
        }
        running.holds_place = false;
        running.waits = true;
        state.computing -= 1;
        state.waiting += 1;
        self.fill_place(state);
    }

    /// The life of a worker thread.
    fn work(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if self.may_start(&state) {
                let Some((id, job)) = state.queue.pop_front() else {
                    continue;
                };
                let running = Running {
                    holds_place: true,
                    waits: false,
                    comes_back: false,
                    abandoned: false,
                    branches: 1,
                    waiting: 0,
                    joining: 0,
                };
                state.running.insert(id, running);
                state.computing += 1;
                // One wake-up may stand for several jobs: pass it on.
                if let Err(error) = self.staff(&mut state) {
                    tracing::warn!(%error, "cannot start a worker thread; queued turns wait");
                }
                self.publish(&state);
                drop(state);
                let place = Place {
                    shared: Arc::clone(self),
                    id,
                };
                if catch_unwind(AssertUnwindSafe(|| job(&place))).is_err() {
                    tracing::error!(id, "a job of the pool panicked outside its own guard");
                }
                state = self.state.lock();
                if let Some(ended) = state.running.remove(&id) {
                    state.computing -= usize::from(ended.holds_place);
                    state.waiting -= usize::from(ended.waits);
                    state.coming_back -= usize::from(ended.comes_back);
                    state.abandoned -= usize::from(ended.abandoned);
                }
                self.fill_place(&mut state);
            } else if state.idle < self.workers {
                state.idle += 1;
                self.work.wait(&mut state);
                state.idle -= 1;
            } else {
                // Enough others wait already.
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn places_bound_what_computes_and_order_is_kept() {
        let pool = Pool::new(2);
        let (began, begins) = mpsc::channel();
        let (release, released) = crossbeam_channel::unbounded::<()>();
        for id in 0..5 {
            let (began, released) = (began.clone(), released.clone());
            pool.submit(id, move |_| {
                began.send(id).unwrap();
                released.recv().unwrap();
            })
            .unwrap();
        }
        let mut first = [begins.recv().unwrap(), begins.recv().unwrap()];
        first.sort_unstable();
        assert_eq!(first, [0, 1]);
        assert_eq!(
            pool.load(),
            Load {
                queued: 3,
                active: 2,
                waiting: 0,
                abandoned: 0
            }
        );
        assert!(pool.withdraw(3) && !pool.withdraw(3) && !pool.withdraw(0));
        for expected in [2, 4] {
            release.send(()).unwrap();
            assert_eq!(begins.recv().unwrap(), expected);
        }
        release.send(()).unwrap();
        release.send(()).unwrap();
    }

    #[test]
    fn two_hundred_waiting_jobs_leave_all_workers_free() {
        let pool = Pool::new(4);
        let (waits, waiting) = mpsc::channel();
        let (answer, answers) = crossbeam_channel::unbounded::<()>();
        let (done, dones) = mpsc::channel();
        for id in 0..200 {
            let (waits, answers, done) = (waits.clone(), answers.clone(), done.clone());
            pool.submit(id, move |place| {
                place.give_up_while(|| {
                    waits.send(()).unwrap();
                    answers.recv().unwrap();
                });
                done.send(()).unwrap();
            })
            .unwrap();
        }
        for _ in 0..200 {
            waiting.recv().unwrap();
        }
        assert_eq!(
            pool.load(),
            Load {
                queued: 0,
                active: 200,
                waiting: 200,
                abandoned: 0
            }
        );
        // All four workers compute at once beside them.
        let barrier = Arc::new(std::sync::Barrier::new(5));
        for id in 200..204 {
            let barrier = Arc::clone(&barrier);
            pool.submit(id, move |_| {
                barrier.wait();
                barrier.wait();
            })
            .unwrap();
        }
        barrier.wait();
        // With every place taken an answered job comes back only when one is free.
        answer.send(()).unwrap();
        assert!(dones.try_recv().is_err());
        barrier.wait();
        dones.recv().unwrap();
        for _ in 1..200 {
            answer.send(()).unwrap();
            dones.recv().unwrap();
        }
    }

    #[test]
    fn a_place_is_given_up_only_when_every_branch_waits() {
        let pool = Pool::new(1);
        let (done, dones) = mpsc::channel();
        let (answer, answers) = crossbeam_channel::unbounded::<()>();
        let (compute, computes) = crossbeam_channel::unbounded::<()>();
        pool.submit(0, move |place| {
            let branches = [place.branch(), place.branch()];
            thread::scope(|scope| {
                let mut parts = Vec::new();
                for (index, branch) in branches.into_iter().enumerate() {
                    let (answers, computes) = (&answers, &computes);
                    parts.push(scope.spawn(move || {
                        let _branch = branch;
                        if index == 0 {
                            computes.recv().unwrap();
                        }
                        place.give_up_while(|| answers.recv().unwrap());
                    }));
                }
                place.join_while(|| parts.into_iter().for_each(|part| part.join().unwrap()));
            });
            done.send(()).unwrap();
        })
        .unwrap();
        let (second, seconds) = mpsc::channel();
        pool.submit(1, move |_| second.send(()).unwrap()).unwrap();
        // One branch may wait as long as it likes: the other one still computes.
        assert!(seconds.try_recv().is_err());
        compute.send(()).unwrap();
        seconds.recv().unwrap();
        answer.send(()).unwrap();
        answer.send(()).unwrap();
        dones.recv().unwrap();
        assert_eq!(pool.load().waiting, 0);
    }

    #[test]
    fn a_place_that_is_free_is_never_left_to_nobody() {
        // Jobs step back and come back at once, over and over, beside jobs that just run.
        let pool = Pool::new(2);
        let (done, dones) = mpsc::channel();
        for id in 0..2000 {
            let done = done.clone();
            pool.submit(id, move |place| {
                for _ in 0..3 {
                    place.give_up_while(thread::yield_now);
                }
                done.send(()).unwrap();
            })
            .unwrap();
        }
        assert_eq!(dones.iter().take(2000).count(), 2000);
    }

    #[test]
    fn an_abandoned_job_frees_its_place_and_a_panic_costs_nothing() {
        let pool = Pool::new(1);
        let (release, released) = mpsc::channel::<()>();
        let (began, begins) = mpsc::channel();
        pool.submit(0, move |_| {
            began.send(()).unwrap();
            let _ = released.recv();
        })
        .unwrap();
        begins.recv().unwrap();
        pool.abandon(0);
        pool.abandon(0);
        pool.submit(1, |_| panic!("on purpose")).unwrap();
        let (done, dones) = mpsc::channel();
        pool.submit(2, move |_| done.send(()).unwrap()).unwrap();
        dones.recv().unwrap();
        drop(release);
    }
}
