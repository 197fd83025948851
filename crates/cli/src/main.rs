//! The `wakeone` command: for each connection, wake one worker, the right one.

fn main() {}
