//! The life of the process: heartbeat, parent, signals, drain, and the deadline that always comes.
//!
//! May use `session`, `pool`, `output` and `protocol`.
//!
//! Invariant: the threads `life` and `deadline` take no lock that a turn can hold.

mod drain;
mod ending;
mod heartbeat;
mod signals;

pub use drain::Drain;
pub use ending::{Cause, Ending};
pub use heartbeat::Pulse;
pub use signals::{Life, Parent};
