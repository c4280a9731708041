//! Every bound of the system, named, with its unit and its reason.
//!
//! A bound that two processes must agree on, or that is related to another one, stands here; the
//! relations are checked when the crate is compiled.

/// Longest line without its line end, in bytes: SPEC §2 (`--max-frame-bytes`).
pub const MAX_FRAME_BYTES: usize = 32 * MIB;

/// Smallest value that `--max-frame-bytes` takes: room for a hello and for a terminal frame.
pub const MIN_MAX_FRAME_BYTES: usize = KIB;

/// Largest value that `--max-frame-bytes` takes, so that a few lines still fit in memory.
pub const MAX_MAX_FRAME_BYTES: usize = GIB;

/// How much of a broken line is looked at for its `type`, `sid` and `request_id`: SPEC §2.
pub const LOOK_BYTES: usize = 64 * KIB;

/// Longest `request_id`, in bytes of JSON, where frames may have `max_frame_bytes`. An answer gives
/// it back whole, so it has to fit into a frame beside everything else.
#[must_use]
pub const fn max_request_id_bytes(max_frame_bytes: usize) -> usize {
    if max_frame_bytes / 4 < MIB {
        max_frame_bytes / 4
    } else {
        MIB
    }
}

/// Longest `sid`, `session_key` and the like, in bytes of JSON between the quotes, where frames may
/// have `max_frame_bytes`: 4 KiB, less for very short frames, never less than 64. Each frame of a
/// session repeats them.
#[must_use]
pub const fn max_name_bytes(max_frame_bytes: usize) -> usize {
    let part = max_frame_bytes / 32;
    if part < 64 {
        64
    } else if part < 4 * KIB {
        part
    } else {
        4 * KIB
    }
}

/// Longest text of a foreign name (a frame type, a route) that an error message repeats, in bytes.
pub const MAX_QUOTED_BYTES: usize = KIB;

/// Size that a line buffer starts with and returns to after a long line, in bytes.
pub const LINE_BUFFER_BYTES: usize = 64 * KIB;

/// Unread output at which turns wait before they add to it, in bytes. What is above is for answers.
pub const TURN_OUTPUT_BYTES: usize = UNREAD_OUTPUT_BYTES / 2;

/// Unread output at which the host stops reading its input, in bytes: SPEC §2.
pub const UNREAD_OUTPUT_BYTES: usize = 64 * MIB;

/// Encoded output of one session at which its deltas are joined instead of framed, in bytes.
/// Some thousand small deltas: a burst of them stays one frame each, however slow the parent.
pub const SESSION_OUTPUT_BYTES: usize = MIB;

/// Joined text at which the turn that streams it waits for the parent, in bytes.
pub const JOINED_TEXT_BYTES: usize = 64 * KIB;

/// Output that is handed to the system in one write, in bytes. Small enough that a reply which
/// arrives meanwhile goes out within milliseconds, large enough for full speed on a pipe.
pub const WRITE_BYTES: usize = 32 * KIB;

/// Longest text of one delta, in bytes; longer ones are sent as several.
pub const MAX_DELTA_BYTES: usize = 256 * KIB;

/// Text of one turn that is kept for its `message.complete` and the history, in bytes. A turn may
/// stream more; the rest is not repeated there, which `message.complete` says.
pub const MAX_TURN_TEXT_BYTES: usize = 16 * MIB;

/// Most turns that `--max-queued-turns` lets wait: each holds its frame in memory.
pub const MAX_MAX_QUEUED_TURNS: usize = 65_536;

/// Least seconds between heartbeats, so that they cost next to nothing.
pub const MIN_HEARTBEAT_SECS: f64 = 0.01;

/// Least time for the end of the process, in milliseconds, also where a `shutdown` gives less: the
/// last frames still have to be written.
pub const MIN_ENDING_MS: u64 = 100;

/// Longest message of an error that an agent raised, in bytes.
pub const MAX_ERROR_MESSAGE_BYTES: usize = 16 * KIB;

/// Turns that wait for a worker: SPEC §5 (`--max-queued-turns`).
pub const MAX_QUEUED_TURNS: usize = 256;

/// Turns that compute at once when nothing else is said: SPEC §5.
pub const WORKERS: usize = 8;

/// Fewest workers: one stuck turn must leave another one: SPEC §5.
pub const MIN_WORKERS: usize = 2;

/// Most workers: each may hold a stack and a session's output.
pub const MAX_WORKERS: usize = 1024;

/// Turns that may hold a thread without a place: those that wait for a person. 2,048 stacks of
/// 2 MiB address space, a few dozen KiB of memory each.
pub const MAX_WAITING_TURNS: usize = 2048;

/// Turns that were given up as stuck and whose place is filled again. Beyond it the places stay
/// lost: a host with so many stuck threads should end, not grow.
pub const MAX_ABANDONED_TURNS: usize = 64;

/// Sessions in memory: SPEC §5.8.
pub const MAX_LIVE_SESSIONS: usize = 1024;

/// Seconds between heartbeats when nothing else is said: SPEC §4.
pub const HEARTBEAT_SECS: u64 = 15;

/// Most seconds between heartbeats: one day.
pub const MAX_HEARTBEAT_SECS: u64 = 86_400;

/// Largest `config.yaml`, in bytes: a thousand times what one needs.
pub const MAX_CONFIG_BYTES: u64 = 4 * MIB as u64;

/// Largest script file, in bytes.
pub const MAX_SCRIPT_FILE_BYTES: u64 = 32 * MIB as u64;

/// Longest script in a prompt, in bytes. Parsed steps take many times the memory of their text.
pub const MAX_SCRIPT_BYTES: usize = MIB;

/// Frames of turns that no worker has taken, together, in bytes. Beyond it turns are refused like
/// those that are too many.
pub const MAX_QUEUED_TURN_BYTES: usize = 256 * MIB;

/// A log file is rotated at this size, in bytes: SPEC §2.
pub const LOG_FILE_BYTES: u64 = 10 * MIB as u64;

/// Rotated log files that are kept: SPEC §2.
pub const LOG_FILES: usize = 5;

/// Wait of a `shutdown` frame without `wait_ms`, in milliseconds: SPEC §3.
pub const SHUTDOWN_WAIT_MS: u64 = 2_000;

/// Longest wait that a `shutdown` frame may ask for, in milliseconds: SPEC §3.
pub const MAX_SHUTDOWN_WAIT_MS: u64 = 60_000;

/// Drain budget after SIGTERM, SIGINT or the death of the parent, in milliseconds: SPEC §8.
pub const SIGNAL_WAIT_MS: u64 = 10_000;

/// Drain budget after the end of input, in milliseconds: SPEC §8.
pub const STDIN_CLOSED_WAIT_MS: u64 = 2_000;

/// Part of a drain that is kept for finalizing, in milliseconds, never more than half: SPEC §8.
pub const DRAIN_RESERVE_MS: u64 = 1_000;

/// How long `session.close` waits for the terminal frame of a live turn, in milliseconds: SPEC §3.
/// The answer is promised within 5 s.
pub const SESSION_CLOSE_WAIT_MS: u64 = 4_500;

/// Milliseconds after which a refused turn may be tried again (`retry_after_ms`): about one short
/// turn, so that a client that obeys finds a free place without polling.
pub const CAPACITY_RETRY_MS: u64 = 1_000;

/// Code of a `turn.error` with reason `capacity`: SPEC §4.
pub const CAPACITY_CODE: i64 = 5019;

/// The version that `hello` names: SPEC §4.
pub const PROTOCOL_VERSION: u32 = 1;

/// Frames that a supervisor keeps for the next host: SPEC §9.
pub const KEPT_FRAMES: usize = 1_024;

/// Bytes of those frames: SPEC §9. Also what may wait for a host that does not read, before the
/// supervisor stops reading the gateway.
pub const KEPT_BYTES: usize = 64 * MIB;

/// Output for a gateway that does not read at which its supervisor stops reading the host, in
/// bytes. Small: the host knows which frames may be joined and which go first.
pub const RELAY_BYTES: usize = MIB;

/// Frames without an answer yet that a supervisor remembers. Beyond it new ones are refused: a
/// host that reads and never answers must not grow its supervisor.
pub const MAX_PENDING_FRAMES: usize = 65_536;

/// Answered frames that a supervisor remembers, to drop a second answer of a faulty host.
pub const SETTLED_FRAMES: usize = 1_024;

/// Questions to the person that a supervisor remembers, to withdraw them when the host ends.
pub const MAX_OPEN_REQUESTS: usize = 4_096;

/// How long a host may take to say hello, in milliseconds: SPEC §9.
pub const HELLO_WAIT_MS: u64 = 10_000;

/// First delay before a host is started again, in milliseconds; it doubles: SPEC §9.
pub const RESPAWN_DELAY_MS: u64 = 250;

/// Longest delay before a host is started again, in milliseconds: SPEC §9.
pub const MAX_RESPAWN_DELAY_MS: u64 = 5_000;

/// Restarts within [`RESPAWN_WINDOW_MS`] when nothing else is said: SPEC §9.
pub const RESPAWN_MAX: usize = 3;

/// The sliding window in which restarts are counted, in milliseconds: SPEC §9.
pub const RESPAWN_WINDOW_MS: u64 = 300_000;

/// After so long a life a host's restarts are forgotten, in milliseconds: SPEC §9.
pub const STABLE_MS: u64 = 60_000;

/// How long a host that closed its input or output may take to end, in milliseconds: a process
/// that exits closes them a moment before.
pub const PIPE_CLOSED_WAIT_MS: u64 = 1_000;

/// Wait between SIGTERM and SIGKILL outside of a drain, in milliseconds: SPEC §9.
pub const TERMINATE_WAIT_MS: u64 = 10_000;

/// What a supervisor grants a draining host beyond its budget, in milliseconds: SPEC §9.
pub const DRAIN_EXCESS_MS: u64 = 2_000;

/// Wait between SIGTERM and SIGKILL for what a dead host left in its session, in milliseconds. The
/// host ends its tools itself; this is for what it could not.
pub const SESSION_WAIT_MS: u64 = 1_000;

/// How long killed processes of a dead host's session are waited for before they are given up, in
/// milliseconds: only the kernel itself can hold them.
pub const SESSION_GIVE_UP_MS: u64 = 10_000;

/// Heartbeat intervals of silence and of no CPU time after which a host hangs: SPEC §9.
pub const SILENT_INTERVALS: u32 = 3;

/// Heartbeat intervals without a heartbeat after which a host hangs in any case: SPEC §9.
pub const BEATLESS_INTERVALS: u32 = 20;

/// How long the answer of a control is kept for after its waiter gave up, in milliseconds: SPEC §9.
pub const LATE_ANSWER_MS: u64 = 1_800_000;

/// Controls whose late answers are waited for: SPEC §9.
pub const LATE_ANSWERS: usize = 64;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const GIB: usize = 1024 * MIB;

const _: () = {
    assert!(MIN_MAX_FRAME_BYTES <= MAX_FRAME_BYTES && MAX_FRAME_BYTES <= MAX_MAX_FRAME_BYTES);
    assert!(
        LOOK_BYTES <= LINE_BUFFER_BYTES,
        "a head is kept in the buffer it was read into"
    );
    // JSON escaping makes a control character six bytes long.
    assert!(6 * MAX_DELTA_BYTES < MAX_FRAME_BYTES);
    assert!(
        MAX_QUEUED_TURN_BYTES >= 2 * MAX_FRAME_BYTES,
        "a large turn must not wait for ever"
    );
    assert!(MAX_TURN_TEXT_BYTES < MAX_FRAME_BYTES);
    assert!(2 * SESSION_OUTPUT_BYTES + 6 * JOINED_TEXT_BYTES < TURN_OUTPUT_BYTES);
    assert!(MIN_WORKERS <= WORKERS && WORKERS <= MAX_WORKERS);
    assert!(SHUTDOWN_WAIT_MS <= MAX_SHUTDOWN_WAIT_MS);
    assert!(RESPAWN_DELAY_MS <= MAX_RESPAWN_DELAY_MS && MAX_RESPAWN_DELAY_MS < RESPAWN_WINDOW_MS);
    assert!(
        MAX_FRAME_BYTES <= KEPT_BYTES,
        "a kept frame may be as long as any"
    );
    assert!(KEPT_FRAMES < MAX_PENDING_FRAMES);
    assert!(SILENT_INTERVALS < BEATLESS_INTERVALS);
    assert!(DRAIN_RESERVE_MS < DRAIN_EXCESS_MS);
};
