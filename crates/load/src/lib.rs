//! An honest load generator: plan, send, record; latency from the planned time.
