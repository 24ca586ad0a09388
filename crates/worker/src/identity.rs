//! Who this process is.

use baton_handoff::InstanceId;

use crate::WorkerError;

/// A new instance id: 128 random bits, never derived from host and port, so that a restarted worker is another one.
///
/// # Errors
/// [`WorkerError::System`] when the system has no randomness.
pub fn new_instance_id() -> Result<InstanceId, WorkerError> {
    let mut bytes = [0; 16];
    let failed = |error: getrandom::Error| std::io::Error::other(error.to_string());
    getrandom::fill(&mut bytes).map_err(failed).map_err(WorkerError::system("draw an instance id"))?;
    Ok(InstanceId(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_processes_never_share_an_id() {
        assert_ne!(new_instance_id().unwrap(), new_instance_id().unwrap());
    }
}
