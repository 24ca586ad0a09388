//! Who may work with whom: a pure comparison of what workers say of themselves.

use baton_dispatch::Role;
use baton_handoff::InstanceId;
use baton_kv::KvLayout;
use baton_proto::PROTOCOL_VERSION;

/// What a worker said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) address: String,
    /// The role it was configured with here.
    pub(crate) expected_role: Role,
    pub(crate) instance: InstanceId,
    pub(crate) role: Option<Role>,
    /// Absent while the model loads.
    pub(crate) layout: Option<Result<KvLayout, String>>,
    pub(crate) protocol_version: u32,
    pub(crate) context: u32,
    pub(crate) num_blocks: u32,
}

/// For each worker why it is refused, if it is. The first decode worker with a layout sets the measure, else
/// the first prefill worker; whoever differs from it, or from the router's own model, is refused with both sides named.
pub(crate) fn judge(workers: &[Option<Description>], own_digest: Option<&[u8; 32]>) -> Vec<Option<String>> {
    let alone: Vec<Option<String>> =
        workers.iter().map(|worker| worker.as_ref().and_then(|worker| alone(worker, own_digest))).collect();
    let measure = [Role::Decode, Role::Prefill].into_iter().find_map(|role| {
        workers.iter().zip(&alone).find_map(|(worker, refused)| match worker {
            Some(worker) if refused.is_none() && worker.expected_role == role => {
                layout(worker).map(|layout| (worker, layout))
            }
            _ => None,
        })
    });
    let Some((first, measure)) = measure else { return alone };
    let against = |worker: &Description| {
        let mismatch = measure.check(layout(worker)?).err()?;
        Some(format!(
            "{} and {} differ in {}: {} there, {} here",
            first.address, worker.address, mismatch.field, mismatch.ours, mismatch.theirs
        ))
    };
    workers
        .iter()
        .zip(alone)
        .map(|(worker, refused)| refused.or_else(|| worker.as_ref().and_then(against)))
        .collect()
}

fn layout(worker: &Description) -> Option<&KvLayout> {
    worker.layout.as_ref()?.as_ref().ok()
}

/// What is wrong with a worker whatever the others are.
fn alone(worker: &Description, own_digest: Option<&[u8; 32]>) -> Option<String> {
    let address = &worker.address;
    if worker.protocol_version != PROTOCOL_VERSION {
        return Some(format!(
            "{address} speaks protocol version {}, this router {PROTOCOL_VERSION}",
            worker.protocol_version
        ));
    }
    if worker.role != Some(worker.expected_role) {
        let found = worker.role.map_or("of no known role", super::role_name);
        return Some(format!(
            "{address} is configured as a {} worker and says it is {found}",
            super::role_name(worker.expected_role)
        ));
    }
    match (&worker.layout, own_digest) {
        (Some(Err(reason)), _) => Some(format!("{address} sent a KV layout that can't be read: {reason}")),
        (Some(Ok(layout)), Some(own)) if layout.model_digest != *own => {
            let hex = |digest: &[u8; 32]| {
                digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect::<String>()
            };
            Some(format!(
                "{address} serves model {}, this router's tokenizer belongs to model {}",
                hex(&layout.model_digest),
                hex(own)
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use baton_kv::KvDtype;

    use super::*;

    fn layout_of(block_size: usize) -> KvLayout {
        KvLayout {
            model_digest: [7; 32],
            num_layers: 4,
            num_kv_heads: 2,
            head_dim: 16,
            block_size,
            dtype: KvDtype::F16,
            arrangement: "a".to_owned(),
            numerics_id: "n".to_owned(),
        }
    }

    fn worker(address: &str, role: Role, block_size: usize) -> Description {
        Description {
            address: address.to_owned(),
            expected_role: role,
            instance: InstanceId([1; 16]),
            role: Some(role),
            layout: Some(Ok(layout_of(block_size))),
            protocol_version: PROTOCOL_VERSION,
            context: 100,
            num_blocks: 10,
        }
    }

    #[test]
    fn alike_workers_are_all_accepted() {
        let workers = [
            Some(worker("p:1", Role::Prefill, 16)),
            None,
            Some(worker("d:1", Role::Decode, 16)),
            Some(Description { layout: None, ..worker("d:2", Role::Decode, 16) }),
        ];
        assert_eq!(judge(&workers, Some(&[7; 32])), [None, None, None, None]);
    }

    #[test]
    fn the_first_decode_worker_is_the_measure_and_both_sides_are_named() {
        let workers = [Some(worker("p:1", Role::Prefill, 32)), Some(worker("d:1", Role::Decode, 16))];
        let verdicts = judge(&workers, None);
        assert_eq!(verdicts[1], None);
        let reason = verdicts[0].as_deref().expect("refused");
        assert_eq!(reason, "d:1 and p:1 differ in block_size: 16 there, 32 here");
    }

    #[test]
    fn protocol_role_and_model_are_checked_against_the_router() {
        let other_protocol = Description { protocol_version: 99, ..worker("p:1", Role::Prefill, 16) };
        let other_role = Description { role: Some(Role::Prefill), ..worker("d:1", Role::Decode, 16) };
        let unreadable =
            Description { layout: Some(Err("dtype fp3".to_owned())), ..worker("d:2", Role::Decode, 16) };
        let verdicts = judge(&[Some(other_protocol), Some(other_role), Some(unreadable)], None);
        for (verdict, word) in verdicts.iter().zip(["protocol version 99", "configured as a decode", "fp3"]) {
            assert!(verdict.as_deref().is_some_and(|reason| reason.contains(word)), "{verdict:?}");
        }
        let verdicts = judge(&[Some(worker("d:1", Role::Decode, 16))], Some(&[8; 32]));
        let reason = verdicts[0].as_deref().expect("refused");
        assert!(reason.contains("0707") && reason.contains("0808"), "{reason}");
    }
}
