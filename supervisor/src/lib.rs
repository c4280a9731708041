//! The parent of one turnhost, and what belongs to its trade.
//!
//! [`replay`] plays transcripts against a host and records them. It knows a host only as a child
//! process with three pipes, so whatever speaks the frames on stdin and stdout can stand there.

pub mod replay;
