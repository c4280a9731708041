//! Transcripts of a host: played and compared, or recorded.
//!
//! `fixture` and `reader` take the file in, `child` runs the host, `inbox` sorts what it writes,
//! `pattern` compares, `player` walks through the lines, `report` tells a person. The way back is
//! `record`, which relays, and `transcript`, which writes down; `json` and `lines` serve both.
//!
//! Invariant: only `fixture`, `player` and `record` touch files, only `child` and `record` start
//! processes; all else is pure.

mod child;
mod fixture;
mod inbox;
mod json;
mod lines;
mod pattern;
mod player;
mod reader;
mod record;
mod report;
mod transcript;

pub use fixture::{Fixture, FixtureError};
pub use pattern::Mismatch;
pub use player::{Options, PlayError, play};
pub use record::{RecordError, Recorded, record};
pub use report::{Failure, Report};
