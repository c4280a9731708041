//! Transcripts of a host: played and compared, or recorded.
//!
//! `fixture` reads the file, `child` runs the host, `inbox` sorts what it writes, `pattern`
//! compares, `player` walks through the lines, `report` tells a person; `record` is the way back.
//! Of these only `fixture` and `record` touch files and only `child` and `record` start processes.

mod child;
mod fixture;
mod inbox;
mod json;
mod lines;
mod pattern;
mod player;
mod record;
mod report;
mod transcript;

pub use fixture::{Fixture, FixtureError};
pub use pattern::Mismatch;
pub use player::{Options, PlayError, play};
pub use record::{RecordError, Recorded, record};
pub use report::{Failure, Report};
