//! Steering chooses the slot of each connection. The [`dispatcher`] loads the programs and keeps their table, and the
//! [`agent`] watches the workers and moves queues. They know sockets and pids, and start no process.

pub mod agent;
pub mod dispatcher;
pub mod slot_sockets;
