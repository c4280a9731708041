//! The command `turnhost-supervisor`.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
