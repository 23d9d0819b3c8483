//! Choices and plans that have been made before, by what they depend on, and memory for the runs to come.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::engine::collective::bounce::StagedSpans;
use crate::engine::collective::operands::Operands;
use crate::engine::collective::plan_key::PlanKey;
use crate::engine::collective::run::{CompiledPlan, Prepared};
use crate::error::Result;
use crate::heap::Scratch;
use crate::plan::Plan;
use crate::plan::select::Choice;
use crate::rarely::Rarely;

/// Plans kept for reuse; beyond it the cache starts anew.
const MOST_PLANS: usize = 512;

/// Pieces of scratch memory that are kept.
const MOST_SCRATCH: usize = 4;

/// The choices, plans and memory that a group keeps from one operation to the next.
#[derive(Debug)]
pub(crate) struct PlanStore {
    choices: FxHashMap<PlanKey, Choice>,
    compiled: FxHashMap<PlanKey, Arc<CompiledPlan>>,
    scratch: Vec<Scratch>,
    bounce: Option<Scratch>,
    nothing: Arc<CompiledPlan>,
    log: Rarely,
}

impl Default for PlanStore {
    fn default() -> Self {
        Self {
            choices: FxHashMap::default(),
            compiled: FxHashMap::default(),
            scratch: Vec::new(),
            bounce: None,
            nothing: Arc::new(CompiledPlan::new(Plan::default(), 1)),
            log: Rarely::new(4, Duration::from_secs(10)),
        }
    }
}

impl PlanStore {
    /// A plan of no steps.
    pub(crate) fn nothing(&self) -> Arc<CompiledPlan> {
        Arc::clone(&self.nothing)
    }

    /// The choice for an operation, made by `choose` the first time. Its argument says whether to log the choice: those
    /// for counts that differ from rank to rank are made for every operation, and logged now and then.
    pub(crate) fn choice(
        &mut self,
        key: Option<PlanKey>,
        choose: impl FnOnce(bool) -> Choice,
    ) -> Choice {
        let Some(key) = key else {
            let is_logged = tracing::enabled!(tracing::Level::DEBUG) && self.log.line().is_some();
            return choose(is_logged);
        };
        if let Some(choice) = self.choices.get(&key) {
            return *choice;
        }
        let choice = choose(true);
        if self.choices.len() >= MOST_PLANS {
            self.choices.clear();
        }
        self.choices.insert(key, choice);
        choice
    }

    /// The plan of an operation, made by `make` the first time.
    pub(crate) fn compiled(
        &mut self,
        key: Option<PlanKey>,
        make: impl FnOnce() -> Result<CompiledPlan>,
    ) -> Result<Arc<CompiledPlan>> {
        if let Some(found) = key.as_ref().and_then(|key| self.compiled.get(key)) {
            return Ok(Arc::clone(found));
        }
        let compiled = Arc::new(make()?);
        if let Some(key) = key {
            if self.compiled.len() >= MOST_PLANS {
                self.compiled.clear();
            }
            self.compiled.insert(key, Arc::clone(&compiled));
        }
        Ok(compiled)
    }

    /// The memory that a run of `compiled` on `operands` needs. `neighbours`: the ranks of this host.
    pub(crate) fn prepare(
        &mut self,
        compiled: Arc<CompiledPlan>,
        operands: &Operands,
        neighbours: usize,
    ) -> Prepared {
        let scratch_bytes = compiled.plan.scratch * operands.elements.partial().size();
        let scratch = (scratch_bytes > 0).then(|| self.take_scratch(scratch_bytes));
        let size = operands
            .elements
            .dtype
            .size()
            .max(operands.elements.partial().size());
        let source = operands.buffers.source();
        let bounce = match neighbours > 2 {
            true => StagedSpans::new(&compiled.repeated_sends, size, source, &mut self.bounce),
            false => None,
        };
        Prepared {
            compiled,
            scratch,
            bounce,
        }
    }

    fn take_scratch(&mut self, bytes: usize) -> Scratch {
        match self.scratch.iter().position(|kept| kept.len() >= bytes) {
            Some(found) => self.scratch.swap_remove(found),
            None => Scratch::new(bytes),
        }
    }

    /// Keeps a few pieces of scratch memory, the largest ones, for the operations to come.
    pub(crate) fn return_scratch(&mut self, scratch: Scratch) {
        self.scratch.push(scratch);
        if self.scratch.len() > MOST_SCRATCH {
            self.scratch.sort_by_key(Scratch::len);
            self.scratch.remove(0);
        }
    }

    pub(crate) fn return_bounce(&mut self, bounce: StagedSpans) {
        self.bounce = Some(bounce.into_scratch());
    }

    /// How many plans there are, and bytes of scratch memory that are kept.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let bytes = self.scratch.iter().map(Scratch::len).sum();
        (self.compiled.len(), bytes)
    }
}
