//! The variables that each launcher sets, and the errors where they do not suffice.

use proptest::prelude::*;

use super::launchers::DEFAULT_PORT;
use super::*;
use crate::config::LAUNCH_SECRET;
use crate::error::Code;

fn detect(variables: &[(&str, &str)]) -> Result<Launch> {
    detect_from(
        &|name| {
            let found = variables.iter().find(|(set, _)| *set == name);
            found.map(|(_, value)| (*value).to_owned())
        },
        4711,
    )
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29400"),
    ("TORCHELASTIC_RUN_ID", "abc"),
];

#[test]
fn torchrun() {
    let launch = detect(TORCHRUN).expect("complete");
    assert_eq!((launch.rank, launch.world), (3, 4));
    assert_eq!((launch.local_rank, launch.local_world), (Some(1), Some(2)));
    assert_eq!(launch.source, "torchrun");
    let master = launch.master.expect("a master");
    assert_eq!((master.host.as_str(), master.port), ("node0", 29400));
    assert_eq!(master.candidates()[..2], [29400, 29401]);
    // The agent serves torch's store at the master's port: ours is elsewhere.
    let mut with_agent = TORCHRUN.to_vec();
    with_agent.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
    let master = detect(&with_agent)
        .expect("complete")
        .master
        .expect("a master");
    assert_eq!(master.candidates()[0], 29401);
    // It wins over the Slurm job that it runs in.
    let mut in_slurm = TORCHRUN.to_vec();
    in_slurm.extend([("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")]);
    assert_eq!(detect(&in_slurm).expect("complete").rank, 3);
}

#[test]
fn the_secret_of_a_launch_is_its_ranks_alone() {
    let secret = "0123456789abcdef0123456789abcdef";
    let mut variables = TORCHRUN[..6].to_vec();
    variables.push((LAUNCH_SECRET, secret));
    let launch = detect(&variables).expect("complete");
    assert_eq!(launch.secret, Some(Secret::from_bytes(secret.as_bytes())));
    assert!(!format!("{launch:?}").contains(secret));
    // Not those that torchrun started inside it.
    let mut inside = TORCHRUN.to_vec();
    inside.push((LAUNCH_SECRET, secret));
    assert_eq!(detect(&inside).expect("complete").secret, None);
    // An error does not show it.
    variables[0].1 = "9";
    let error = detect(&variables).expect_err("a wrong rank");
    assert!(!error.message.contains(secret), "{error}");
    variables[0].1 = "3";
    variables[6].1 = "0123";
    let error = detect(&variables).expect_err("cut off");
    assert!(error.message.contains("was changed"), "{error}");
    assert!(!error.message.contains("0123"), "{error}");
}

#[test]
fn candidates_wrap_above_the_system_ports() {
    let master = Master {
        host: String::new(),
        port: 65530,
        is_taken: true,
    };
    let ports = master.candidates();
    assert_eq!(ports[..7], [65531, 65532, 65533, 65534, 65535, 1024, 1025]);
    assert_eq!(ports.len(), usize::from(CANDIDATES));
}

#[test]
fn slurm() {
    let variables = [
        ("SLURM_PROCID", "2"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_JOB_ID", "991"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_JOB_NODELIST", "rack[1-2]n[05-08,11],login1"),
    ];
    let launch = detect(&variables).expect("complete");
    assert_eq!(
        (launch.rank, launch.world, launch.local_rank),
        (2, 4, Some(0))
    );
    let master = launch.master.expect("a master");
    assert_eq!(master.host, "rack1n05");
    assert!((15_000..32_000).contains(&master.port));
    // The same on another rank, another one for another step.
    let mut other = variables;
    other[0].1 = "3";
    assert_eq!(detect(&other).expect("complete").job, launch.job);
    other[4].1 = "1";
    assert_ne!(detect(&other).expect("complete").job, launch.job);
}

#[test]
fn mpi() {
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-node0-17@1"),
    ];
    let launch = detect(&open_mpi).expect("complete");
    assert_eq!(launch.source, "Open MPI");
    assert_eq!(launch.master.expect("one host").host, "127.0.0.1");
    let mut two_hosts = open_mpi.to_vec();
    two_hosts[1].1 = "4";
    let error = detect(&two_hosts).expect_err("no master");
    assert!(error.message.contains("missing: MASTER_ADDR"), "{error}");
    two_hosts.push(("MASTER_ADDR", "node0"));
    assert_eq!(
        detect(&two_hosts)
            .expect("complete")
            .master
            .expect("set")
            .host,
        "node0"
    );

    two_hosts.pop();
    two_hosts.extend([
        ("SLURM_JOB_NODELIST", "node[3-4]"),
        ("SLURM_STEP_NODELIST", "node4"),
    ]);
    let launch = detect(&two_hosts).expect("the job's hosts are known");
    assert_eq!(launch.source, "Open MPI");
    assert_eq!(launch.master.expect("first host").host, "node3");

    let mpich = [
        ("PMI_RANK", "0"),
        ("PMI_SIZE", "2"),
        ("MPI_LOCALRANKID", "0"),
        ("MPI_LOCALNRANKS", "2"),
    ];
    let launch = detect(&mpich).expect("complete");
    assert_eq!(launch.source, "MPICH");
    assert!(launch.master.is_some() && launch.job.contains("4711"));
}

#[test]
fn slurm_that_speaks_pmi_is_slurm() {
    let mut variables = vec![
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "2"),
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_JOB_ID", "7"),
        ("SLURM_JOB_NODELIST", "node[1-2]"),
    ];
    let launch = detect(&variables).expect("complete");
    assert_eq!((launch.source, launch.rank), ("Slurm", 1));
    assert_eq!(launch.master.expect("a master").host, "node1");
    // MPICH's launcher inside a Slurm job: one task per host.
    variables.extend([("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")]);
    variables[2] = ("SLURM_PROCID", "0");
    let launch = detect(&variables).expect("complete");
    assert_eq!((launch.source, launch.rank), ("MPICH", 1));
}

#[test]
fn kubernetes() {
    let mut variables = vec![
        ("JOB_COMPLETION_INDEX", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "job-0.job"),
    ];
    let launch = detect(&variables).expect("complete");
    assert_eq!((launch.rank, launch.source), (1, "Kubernetes"));
    assert_eq!(launch.master.expect("set").port, DEFAULT_PORT);
    variables.remove(1);
    let error = detect(&variables).expect_err("no world size");
    assert!(error.message.contains("missing: WORLD_SIZE"), "{error}");
}

#[test]
fn a_world_of_one_needs_no_master() {
    let launch = detect(&[("RANK", "0"), ("WORLD_SIZE", "1")]).expect("complete");
    assert_eq!(launch.master, None);
}

#[test]
fn what_is_wrong_is_said() {
    for (variables, says) in [
        (&[][..], "missing: RANK, WORLD_SIZE (set: none)"),
        (&[("WORLD_SIZE", "2")], "(set: WORLD_SIZE=2)"),
        (&[("RANK", "0")], "missing: WORLD_SIZE (set: RANK=0)"),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2")],
            "missing: MASTER_ADDR, MASTER_PORT",
        ),
        (
            &[("RANK", "2"), ("WORLD_SIZE", "2")],
            "rank 2 is not below the world size 2",
        ),
        (&[("RANK", "two"), ("WORLD_SIZE", "2")], "RANK is \"two\""),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "0")],
            "not below the world size 0",
        ),
        (
            &[
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "4"),
                ("WORLD_SIZE", "2"),
            ],
            "WORLD_SIZE is 2, but Slurm says 4",
        ),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "70000")],
            "MASTER_PORT is 70000",
        ),
    ] {
        let error = detect(variables).expect_err(says);
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.contains(says), "{says}: {error}");
        assert!(error.message.contains("unisono launch -n 2"), "{error}");
    }
}

proptest! {
    #[test]
    fn no_value_panics(values in prop::collection::vec("[0-9a-z,\\[\\]-]{0,8}", 12)) {
        let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK",
            "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_JOB_ID",
            "JOB_COMPLETION_INDEX"];
        let variables: Vec<_> =
            names.iter().zip(&values).map(|(name, value)| (*name, value.as_str())).collect();
        let _ = detect(&variables);
    }
}
