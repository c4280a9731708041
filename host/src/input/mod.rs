//! Stdin to handlers. Stands at the top: it knows all handlers, and nobody knows it.
//!
//! Invariant: the reader thread runs no agent, no tool, no control and no file work, and waits for
//! nothing but input, except at [`limits::UNREAD_OUTPUT_BYTES`] of unread output.
//!
//! [`limits::UNREAD_OUTPUT_BYTES`]: turnhost_protocol::limits::UNREAD_OUTPUT_BYTES

mod dispatch;
mod reader;

pub use dispatch::{Dispatcher, HANDLED};
pub use reader::read;
