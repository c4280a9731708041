//! The program `turnhost`.

use std::os::fd::AsFd;
use std::process::ExitCode;

use clap::Parser;
use turnhost::config::{Flags, Settings};

fn main() -> ExitCode {
    let flags = Flags::parse();
    let settings = match Settings::new(flags, |name| std::env::var_os(name)) {
        Ok(settings) => settings,
        Err(error) => {
            eprintln!("turnhost: {error}");
            return ExitCode::from(error.exit_code());
        }
    };
    let (stdin, stdout) = (std::io::stdin(), std::io::stdout());
    let streams = stdin
        .as_fd()
        .try_clone_to_owned()
        .and_then(|stdin| Ok((stdin, stdout.as_fd().try_clone_to_owned()?)));
    let result = streams.and_then(|(stdin, stdout)| turnhost::run(settings, stdin, stdout));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("turnhost: cannot start: {error}");
            ExitCode::FAILURE
        }
    }
}
