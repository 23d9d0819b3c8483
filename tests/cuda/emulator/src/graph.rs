//! Graphs: operations and what each comes after, made by capture, and run as one operation of a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Scope;

use parking_lot::Mutex;

use crate::abi::Handle;
use crate::context::Context;
use crate::handles::Handles;
use crate::operation::Operation;
use crate::status::Outcome;

/// Operations, each after some of those before it.
#[derive(Clone, Default)]
pub(crate) struct Graph {
    nodes: Vec<Node>,
}

#[derive(Clone)]
struct Node {
    operation: Operation,
    after: Vec<usize>,
}

/// A graph a stream can run, again and again, but never twice at the same time.
pub(crate) struct Executable {
    pub(crate) handle: Handle,
    graph: Graph,
    /// For each node those that come after it.
    next: Vec<Vec<usize>>,
    running: Mutex<()>,
}

struct Run<'a> {
    context: &'a Arc<Context>,
    /// For each node how many it still comes after.
    missing: Vec<AtomicUsize>,
}

static GRAPHS: Handles<Graph> = Handles::new();
static EXECUTABLES: Handles<Executable> = Handles::new();

impl Graph {
    /// Adds a node behind others.
    pub(crate) fn add(&mut self, operation: Operation, after: Vec<usize>) -> usize {
        self.nodes.push(Node { operation, after });
        self.nodes.len() - 1
    }

    /// Whether nothing comes after any node but another node or the end after `last`.
    pub(crate) fn all_lead_to(&self, last: &[usize]) -> bool {
        let mut followed = vec![false; self.nodes.len()];
        let before = self.nodes.iter().flat_map(|node| &node.after);
        for &node in before.chain(last) {
            followed[node] = true;
        }
        followed.into_iter().all(|followed| followed)
    }
}

impl Executable {
    /// Runs all nodes. Those that nothing orders run in threads of their own, as a device may run them at once.
    pub(crate) fn execute(&self, context: &Arc<Context>) -> Outcome {
        let _one_at_a_time = self.running.lock();
        let nodes = &self.graph.nodes;
        let run = Run {
            context,
            missing: nodes
                .iter()
                .map(|node| AtomicUsize::new(node.after.len()))
                .collect(),
        };
        let first = (0..nodes.len()).filter(|&node| nodes[node].after.is_empty());
        std::thread::scope(|scope| {
            let run = &run;
            let mut own = None;
            for node in first {
                if own.is_none() {
                    own = Some(node);
                } else {
                    scope.spawn(move || self.chain(scope, run, node));
                }
            }
            if let Some(node) = own {
                self.chain(scope, run, node);
            }
        });
        context.check()
    }

    /// Runs a node and what it makes ready.
    fn chain<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        run: &'scope Run<'scope>,
        first: usize,
    ) {
        let mut ready = Some(first);
        while let Some(node) = ready.take() {
            if !run.context.is_broken()
                && let Err(error) = self.graph.nodes[node].operation.execute(run.context)
            {
                run.context.fail(error);
            }
            for &next in &self.next[node] {
                if run.missing[next].fetch_sub(1, Ordering::AcqRel) > 1 {
                    continue;
                }
                if ready.is_none() {
                    ready = Some(next);
                } else {
                    scope.spawn(move || self.chain(scope, run, next));
                }
            }
        }
    }
}

/// Gives a graph a handle.
pub(crate) fn keep(graph: Graph) -> Handle {
    let mut own = 0;
    GRAPHS.insert(|handle| {
        own = handle;
        graph
    });
    own
}

/// Makes a graph executable.
pub(crate) fn instantiate(handle: Handle) -> Outcome<Handle> {
    let graph = Graph::clone(&*GRAPHS.get(handle)?);
    let mut next = vec![Vec::new(); graph.nodes.len()];
    for (number, node) in graph.nodes.iter().enumerate() {
        for &before in &node.after {
            next[before].push(number);
        }
    }
    let executable = EXECUTABLES.insert(|handle| Executable {
        handle,
        graph,
        next,
        running: Mutex::new(()),
    });
    Ok(executable.handle)
}

/// The nodes of a graph.
pub(crate) fn nodes(handle: Handle) -> Outcome<usize> {
    Ok(GRAPHS.get(handle)?.nodes.len())
}

/// The executable with this handle.
pub(crate) fn executable(handle: Handle) -> Outcome<Arc<Executable>> {
    EXECUTABLES.get(handle)
}

pub(crate) fn destroy(handle: Handle) -> Outcome {
    GRAPHS.remove(handle).map(|_| ())
}

/// Destroys an executable; runs under way end as they would.
pub(crate) fn destroy_executable(handle: Handle) -> Outcome {
    EXECUTABLES.remove(handle).map(|_| ())
}

/// Graphs and executables that were made and not destroyed.
pub(crate) fn counts() -> (usize, usize) {
    (GRAPHS.count(), EXECUTABLES.count())
}
