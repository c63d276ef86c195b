-- Argo CD's health of an InferenceService. In ConfigMap argocd-cm of Argo CD's namespace, as
--   data:
--     resource.customizations.health.serving.kvline.dev_InferenceService: |
--       (this file)
-- Degraded: a user has to change something, also where the stable revision still serves.
local health = { status = "Progressing", message = "the operator has not reconciled this spec yet" }
local status = obj.status
if status == nil or status.conditions == nil then
  return health
end
if (status.observedGeneration or 0) < (obj.metadata.generation or 0) then
  return health
end

local found = {}
for _, condition in ipairs(status.conditions) do
  found[condition.type] = condition
end
local function is(kind, state)
  return found[kind] ~= nil and found[kind].status == state
end
local function answer(name, kind)
  health.status = name
  health.message = (found[kind].reason or "") .. ": " .. (found[kind].message or "")
  return health
end

if is("Stalled", "True") then
  return answer("Degraded", "Stalled")
end
if is("UpToDate", "False") and found.UpToDate.reason == "Paused" then
  return answer("Suspended", "UpToDate")
end
if is("Reconciling", "True") then
  return answer("Progressing", "Reconciling")
end
if is("Ready", "True") or (found.Ready ~= nil and found.Ready.reason == "ScaledToZero") then
  return answer("Healthy", "Ready")
end
return health
